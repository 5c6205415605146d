"""The dashboard against Grafana's own schema of dashboards and panels, as Grafana publishes it for TypeScript.

`make test-grafana` installs the schema and the compiler into build/grafana, and runs this; without it, it is skipped.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.documents import DASHBOARD, ROOT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

PACKAGES = ROOT / "build" / "grafana" / "node_modules"

_RAW = "@grafana/schema/dist/esm/raw"

#: Module and types of the options of each kind of panel, and of its own settings of fields.
PANELS = {
    "timeseries": (f"{_RAW}/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen", "Options", "FieldConfig"),
    "stat": (f"{_RAW}/composable/stat/panelcfg/x/StatPanelCfg_types.gen", "Options", ""),
    "heatmap": (f"{_RAW}/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen", "Options", "FieldConfig"),
}

#: JSON has the values of enumerations as texts, and Grafana adds what is left out.
HEAD = f"""
import type {{ Dashboard, Panel, RowPanel, VariableModel }} from "{_RAW}/dashboard/x/Dashboard_types.gen";
type Json<T> = unknown extends T ? T
  : T extends string ? `${{T}}`
  : T extends (infer U)[] ? Json<U>[]
  : T extends object ? {{ [K in keyof T]?: Json<T[K]> }}
  : T;
"""


def program(dashboard: dict[str, Any]) -> str:
    """Return TypeScript in which each part of the dashboard is a constant of its type."""
    lines = [HEAD]

    def add(name: str, type: str, value: Any) -> None:
        lines.append(f"export const {name}: Json<{type}> = {json.dumps(value)};")

    for kind, (module, options, field) in PANELS.items():
        types = [f"{options} as {kind}Options", *([f"{field} as {kind}Field"] if field else [])]
        lines.append(f'import type {{ {", ".join(types)} }} from "{module}";')
    for number, variable in enumerate(dashboard["templating"]["list"]):
        add(f"variable{number}", "VariableModel", variable)
    for panel in dashboard["panels"]:
        number, kind = panel["id"], panel["type"]
        if kind == "row":
            add(f"row{number}", "RowPanel", panel)
            continue
        assert kind in PANELS, f"a kind of panel whose types are not known here: {kind}"
        defaults = panel["fieldConfig"]["defaults"]
        if "custom" in defaults:
            add(f"custom{number}", f"{kind}Field", defaults.pop("custom"))
        add(f"options{number}", f"{kind}Options", panel.pop("options"))
        add(f"panel{number}", "Panel", panel)
    add("dashboard", "Dashboard", {key: each for key, each in dashboard.items() if key not in ("panels", "templating")})
    return "\n".join(lines)


def complaints(dashboard: dict[str, Any], folder: Path) -> str:
    """Return what the compiler says; skips the test where it is not installed."""
    compiler = PACKAGES / ".bin" / "tsc"
    if not compiler.exists() or not (PACKAGES / "@grafana" / "schema").exists():
        pytest.skip("Grafana's schema and the compiler of TypeScript are not installed: make test-grafana")
    (folder / "node_modules").symlink_to(PACKAGES)
    (folder / "package.json").write_text("{}")
    (folder / "dashboard.ts").write_text(program(dashboard))
    options = {"strict": True, "noEmit": True, "skipLibCheck": True, "module": "nodenext", "types": []}
    (folder / "tsconfig.json").write_text(json.dumps({"compilerOptions": options, "files": ["dashboard.ts"]}))
    done = subprocess.run([compiler, "-p", folder], capture_output=True, text=True, timeout=50, check=False)
    return done.stdout + done.stderr


def test_the_dashboard_has_the_types_of_grafanas_schema(tmp_path: Path) -> None:
    assert complaints(json.loads(DASHBOARD.read_text()), tmp_path) == ""


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"options": {"colourMode": "value"}}, "'\"colourMode\"' does not exist"),
        ({"options": {"colorMode": "valu"}}, 'is not assignable to type \'"value"'),
        ({"gridPos": {"x": "0"}}, "Type 'string' is not assignable to type 'number'"),
    ],
)
def test_a_wrong_panel_is_noticed(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    stat = next(panel for panel in dashboard["panels"] if panel["type"] == "stat")
    stat.update(change)
    assert complaint in complaints(dashboard, tmp_path)
