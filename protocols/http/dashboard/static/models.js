// The table of models.

import { byId, count, duration, make, milliseconds, put, putAttribute, rate } from "./page.js";

const TROUBLE_STATES = { UNAVAILABLE: "bad", LOADING: "warn", UNLOADING: "warn", UNKNOWN: "warn", READY: "good" };

/** Name of a column, its title, and the value by which it is sorted. */
const COLUMNS = [
  { name: "name", title: "Model", value: (row) => row.name, text: true },
  { name: "version", title: "Version", value: (row) => Number(row.version) || 0, text: true },
  { name: "state", title: "State", value: (row, reason) => -trouble(row, reason), text: true },
  { name: "rate", title: "Requests/s", value: (row) => row.rate ?? 0 },
  { name: "p50", title: "p50", value: (row) => row.p50_ms ?? -1 },
  { name: "p99", title: "p99", value: (row) => row.p99_ms ?? -1 },
  { name: "queue", title: "Queue", value: (row) => row.queue ?? 0 },
  { name: "flight", title: "In flight", value: (row) => row.in_flight ?? 0 },
  { name: "batch", title: "Batch", value: (row) => row.batch ?? -1 },
  { name: "errors", title: "Errors", value: (row) => (row.failures ?? 0) + (row.refused ?? 0) },
  { name: "instances", title: "Instances", value: (row) => row.instances ?? 0 },
  { name: "restarts", title: "Restarts", value: (row) => row.restarts ?? 0 },
];

const BATCH_TITLE = "Rows of requests that succeeded, for each execution. Below 1: executions have failed.";

export function stateKind(state) {
  return TROUBLE_STATES[state] ?? "";
}

export class Models {
  /** `onChoose([name, version])` is called when a person chooses a model. */
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.entries = new Map();
    this.sorted = { name: "state", down: false }; // models with problems first
    this.chosen = "";
    this.heads = COLUMNS.map((column) => {
      const title = { state: "Models with problems first", batch: BATCH_TITLE }[column.name];
      const button = make("button", { type: "button", title, onclick: () => this.sortBy(column.name) }, column.title);
      return make("th", { scope: "col", class: column.text ? "" : "number" }, button);
    });
    byId("models-head").append(...this.heads);
    byId("filter").addEventListener("input", () => this.arrange());
    byId("only-trouble").addEventListener("change", () => this.arrange());
  }

  /** All that is known is void: a new stream begins. What it does not mention is removed by `settle`. */
  begin() {
    for (const entry of this.entries.values()) entry.stale = true;
  }

  settle() {
    for (const [key, entry] of this.entries) if (entry.stale) this.entries.delete(key);
    this.arrange();
  }

  update(rows) {
    for (const { row, reason } of rows) {
      const key = JSON.stringify([row.name, row.version ?? ""]);
      let entry = this.entries.get(key);
      if (!entry) {
        entry = this.makeEntry(key, row);
        this.entries.set(key, entry);
      }
      entry.row = row;
      entry.reason = reason ?? "";
      entry.stale = false;
      this.show(entry);
    }
  }

  remove(keys) {
    for (const [name, version] of keys) this.entries.delete(JSON.stringify([name, version]));
  }

  find(chosen) {
    return chosen ? this.entries.get(JSON.stringify(chosen)) : undefined;
  }

  choose(chosen) {
    this.chosen = chosen ? JSON.stringify(chosen) : "";
    for (const [key, entry] of this.entries) {
      for (const node of entry.nodes) putAttribute(node, "aria-selected", key === this.chosen ? "true" : "");
    }
  }

  /** Scroll the table so that the chosen model is seen. */
  reveal() {
    const row = this.entries.get(this.chosen)?.nodes[0];
    const box = row?.closest(".table-box");
    if (box) box.scrollTop = row.offsetTop - row.closest("table").tHead.offsetHeight;
  }

  makeEntry(key, row) {
    const chosen = [row.name, row.version ?? ""];
    const button = make("button", { type: "button", onclick: () => this.onChoose(chosen) }, row.name);
    const cells = COLUMNS.map((column) => make("td", { class: column.text ? `in-${column.name}` : "number" }));
    cells[0].append(button);
    const state = make("span", { class: "state" });
    cells[2].append(state);
    // The reason of the state is below it, over the width of the table.
    const why = make("div");
    const nodes = [
      make("tr", {}, ...cells),
      make("tr", { class: "why", hidden: true }, make("td", { colspan: 2 }), make("td", { colspan: COLUMNS.length - 2 }, why)),
    ];
    if (key === this.chosen) for (const node of nodes) node.setAttribute("aria-selected", "true");
    return { nodes, cells, state, why, row, reason: "", stale: false };
  }

  show(entry) {
    const { row, cells, state, reason } = entry;
    const loaded = row.version && row.state === "READY";
    put(cells[1], row.version ?? "");
    put(state, row.state || "not loaded");
    putAttribute(state, "data-kind", row.state === "UNAVAILABLE" && reason === "unloaded" ? "" : stateKind(row.state));
    const errors = (row.failures ?? 0) + (row.refused ?? 0);
    const texts = [
      loaded ? rate(row.rate ?? 0) : "",
      row.p50_ms == null ? "" : milliseconds(row.p50_ms),
      row.p99_ms == null ? "" : milliseconds(row.p99_ms),
      loaded ? count(row.queue ?? 0) : "",
      loaded ? count(row.in_flight ?? 0) + (row.oldest_ms > 1000 ? ` (${duration(row.oldest_ms)})` : "") : "",
      row.batch == null ? "" : row.batch.toFixed(1),
      loaded || errors ? count(errors) : "",
      row.ensemble ? "ensemble" : loaded || row.instances ? `${row.serving ?? 0}/${row.instances ?? 0}` : "",
      loaded || row.restarts ? count(row.restarts ?? 0) : "",
    ];
    texts.forEach((text, place) => {
      const cell = cells[place + 3];
      put(cell, text);
      cell.classList.toggle("zero", text === "0");
    });
    cells[7].classList.toggle("warm", row.oldest_ms > 10000);
    cells[9].classList.toggle("hot", (row.failure_rate ?? 0) > 0);
    cells[10].classList.toggle("hot", loaded && !row.ensemble && (row.serving ?? 0) < (row.instances ?? 0));
    cells[11].classList.toggle("warm", (row.restarts ?? 0) > 0);
    putAttribute(cells[8], "title", row.batch < 1 ? BATCH_TITLE : "");
    put(entry.why, reason);
    putAttribute(entry.why, "data-kind", stateKind(row.state));
    entry.nodes[1].hidden = !reason || reason === "unloaded";
  }

  sortBy(name) {
    const down = this.sorted.name === name ? !this.sorted.down : !COLUMNS.find((column) => column.name === name).text;
    this.sorted = { name, down };
    this.arrange();
  }

  /** Put the rows that are wanted into their order. Nodes that are in their place already stay untouched. */
  arrange() {
    const { name, down } = this.sorted;
    const column = COLUMNS.find((each) => each.name === name);
    this.heads.forEach((head, place) => {
      putAttribute(head, "aria-sort", COLUMNS[place].name !== name ? "" : down ? "descending" : "ascending");
    });
    const wanted = byId("filter").value.trim().toLowerCase();
    const onlyTrouble = byId("only-trouble").checked;
    const shown = [...this.entries.values()].filter(
      ({ row, reason }) => row.name.toLowerCase().includes(wanted) && (!onlyTrouble || trouble(row, reason) > 0),
    );
    const sign = down ? -1 : 1;
    shown.sort((one, other) => {
      const first = column.value(one.row, one.reason);
      const second = column.value(other.row, other.reason);
      const order = typeof first === "string" ? first.localeCompare(second, "en", { numeric: true }) : first - second;
      return sign * order || one.row.name.localeCompare(other.row.name, "en", { numeric: true }) ||
        Number(one.row.version ?? 0) - Number(other.row.version ?? 0);
    });
    const body = byId("models-body");
    let next = body.firstChild;
    for (const node of shown.flatMap((entry) => entry.nodes)) {
      if (node === next) next = next.nextSibling;
      else body.insertBefore(node, next);
    }
    while (next) {
      const last = next;
      next = next.nextSibling;
      last.remove();
    }
    const all = this.entries.size;
    put(byId("models-count"), shown.length === all ? `${count(all)}` : `${count(shown.length)} of ${count(all)}`);
    byId("models-empty").hidden = shown.length > 0;
  }
}

/** Return how bad the state of a model is: 3 if it is not served, 0 if nothing is wrong. */
function trouble(row, reason) {
  if (row.state && row.state !== "READY" && reason !== "unloaded") return row.state === "LOADING" ? 1 : 3;
  if ((row.serving ?? 0) < (row.instances ?? 0) || row.oldest_ms > 10000) return 2;
  return row.failures > 0 || row.refused > 0 || row.restarts > 0 ? 1 : 0;
}
