"""What to do about a plan that cannot be loaded, from TensorRT's own text. Pure."""

from __future__ import annotations

from kernel.texts import install_command

#: Parts of TensorRT's texts, in lower case, with what they mean. The first one that is found counts.
_CAUSES = (
    (("magic tag",), "notaplan"),
    (("host code",), "hostcode"),
    (("version tag", "expecting library version", "kserialization_version", "lean runtime", "incompatible version"),
     "version"),
    (("compute capability", "expecting compute", "incompatible device", "different sm"), "device"),
    (("getplugincreator", "plugin not found", "creator"), "plugin"),
    (("out of memory", "outofmemory", "cudamalloc", "cuda error 2"), "memory"),
)  # fmt: skip

_BUILD = "build it with `naiad build-engine` on this machine"


def plan_hint(reason: str, version: str, capability: tuple[int, int], *, lean: bool) -> str:
    """Return what to do, as the end of an error's text; empty if `reason` is not known.

    `version` is that of TensorRT, `capability` that of the device; `lean` says that only the runtime for
    version-compatible plans is installed.
    """
    text = reason.lower()
    cause = next((name for parts, name in _CAUSES if any(part in text for part in parts)), "")
    device = f"{capability[0]}.{capability[1]}"
    if cause == "version" and lean:
        return (
            f". This server has only the lean runtime of TensorRT {version}, which loads plans that were built with "
            "`naiad build-engine --version-compatible`: build the plan so, or " + install_command("tensorrt")
        )
    hints = {
        "notaplan": f". The file is no plan of TensorRT: {_BUILD}",
        "version": (
            f". The plan is of another version of TensorRT than this server's, {version}: {_BUILD}, or with "
            "--version-compatible, and start the server with --backend-config=tensorrt,version-compatible=true"
        ),
        "hostcode": (
            ". The plan contains code for the host, as all version-compatible plans: if you trust it, start the server "
            "with --backend-config=tensorrt,version-compatible=true"
        ),
        "device": (
            f". The plan is for another kind of GPU than this one, of compute capability {device}: {_BUILD}, or with "
            "--hardware-compatibility=ampere+, or name a plan for each capability in cc_model_filenames"
        ),
        "plugin": (
            ". A plugin that the plan needs is missing: name its library, --backend-config=tensorrt,plugins=FILE.so"
        ),
        "memory": ". The device has too little free memory",
    }
    return hints.get(cause, "")
