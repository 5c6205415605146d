"""Files of tree models: their names in Triton's repositories, and what their first bytes say. Pure."""

from __future__ import annotations

#: Type of a model in Triton's FIL backend → the name of its file.
TREE_FILE_NAMES = {
    "xgboost": "xgboost.model",
    "xgboost_json": "xgboost.json",
    "xgboost_ubj": "xgboost.ubj",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}

#: How many bytes `tree_file_type` needs.
TREE_HEAD_BYTE_SIZE = 64


def tree_file_type(data: bytes) -> str:
    """Return the type of a file that begins with `data`, a key of `TREE_FILE_NAMES`; "" if it is none."""
    if data[:2] in (b"{L", b"{l"):  # an object whose first key has a length of 64 or 32 bits
        return "xgboost_ubj"
    if b"".join(data.split()).startswith(b'{"learner"'):
        return "xgboost_json"
    if data.startswith((b"tree\n", b"tree\r\n")):
        return "lightgbm"
    if data.startswith(b"binf"):
        return "xgboost"
    major, minor = int.from_bytes(data[:4], "little"), int.from_bytes(data[4:8], "little")
    if len(data) >= 12 and (major == 4 or (major, minor) == (3, 9)) and minor < 1000:
        return "treelite_checkpoint"
    return ""
