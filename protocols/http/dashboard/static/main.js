// The page: connects the event stream to its parts, and the address to what is chosen.

import { History, sparkline } from "./charts.js";
import { Detail } from "./detail.js";
import { showTraffic } from "./traffic.js";
import { Models } from "./models.js";
import { byId, bytes, clockTime, count, counted, keys, make, percent, put, putAttribute, rate } from "./page.js";
import { showSettings } from "./settings.js";
import { Stream } from "./stream.js";

const MOST_LINES = 200;
const SERVER_STATES = {
  ready: ["good", "ready"], degraded: ["bad", "a model is not ready"], starting: ["warn", "loading models"],
  stopping: ["warn", "stopping"], failed: ["bad", "the start failed"],
};

const detail = new Detail();
const models = new Models((chosen) => {
  location.hash = new URLSearchParams({ model: chosen[0], version: chosen[1] }).toString();
});
let chosen = null;
let complete = false; // whether the first snapshot of this stream was received
let wantsLines = true;
let wantsScroll = false; // the page was opened with a model: once the table above it is complete

// ---- tiles ---------------------------------------------------------------------------------

const TILES = [
  { name: "rate", title: "Requests/s", figure: (server) => rate(server.rate), value: (server) => server.rate, past: "rate",
    note: (server) => `${count(server.in_flight)} in flight` },
  { name: "errors", title: "Errors/s", figure: (server) => rate(server.failure_rate),
    past: "failure_rate", value: (server) => server.failure_rate, kind: (server) => (server.failure_rate > 0 ? "bad" : "") },
  { name: "queue", title: "Waiting requests", figure: (server) => count(server.queue), value: (server) => server.queue,
    past: "queue" },
  { name: "models", title: "Models ready", figure: (server) => `${count(server.ready_models)}/${count(server.models)}`,
    note: (server) => `${counted(server.instances, "instance")}, ${counted(server.restarts, "restart")}` },
  { name: "tensors", title: "Memory of tensors", figure: (server) => bytes(server.tensor_byte_size),
    past: "tensor_byte_size", value: (server) => server.tensor_byte_size, note: (server) => `of ${bytes(server.tensor_limit)}`,
    kind: (server) => (server.tensor_byte_size > 0.9 * server.tensor_limit ? "bad" : "") },
  { name: "kernel", title: "Kernel process", figure: (server) => percent(server.cpu), value: (server) => server.cpu ?? 0,
    past: "cpu", note: (server) => `${bytes(server.byte_size)} of memory` },
  { name: "clients", title: "Connections",
    figure: (server) => count(Object.values(server.connections).reduce((sum, each) => sum + each, 0)),
    note: (server) => Object.entries(server.connections).map(([name, each]) => `${name} ${count(each)}`).join(", ") },
  { name: "regions", title: "Regions of clients", figure: (server) => count(server.regions),
    note: (server) => bytes(server.region_byte_size), absent: (server) => !server.regions },
];

for (const tile of TILES) {
  tile.history = new History();
  tile.shown = { figure: make("div", { class: "figure" }, "–"), note: make("div", { class: "note" }), line: make("div") };
  tile.node = make("div", { class: "tile" }, make("dt", {}, tile.title),
    make("dd", {}, tile.shown.figure, tile.shown.note, tile.shown.line));
  byId("tiles").append(tile.node);
}

function showServer({ server }) {
  for (const tile of TILES) {
    put(tile.shown.figure, tile.figure(server));
    put(tile.shown.note, tile.note ? tile.note(server) : "");
    putAttribute(tile.node, "data-kind", tile.kind ? tile.kind(server) : "");
    tile.node.hidden = tile.absent?.(server) ?? false;
    if (tile.value) {
      tile.history.add(tile.value(server));
      tile.shown.line.replaceChildren(sparkline(tile.history.values));
    }
  }
  const [kind, text] = SERVER_STATES[server.state];
  const lost = server.lost_log_lines ? `; ${count(server.lost_log_lines)} lines of the log were lost` : "";
  const failed = server.background_failures
    ? `; work in the background has failed ${count(server.background_failures)} times, see the log` : "";
  showDoors(server.front_doors);
  const trouble = server.repository_trouble ? `; ${server.repository_trouble}` : "";
  put(byId("server-state"), text + lost + failed + trouble);
  putAttribute(byId("server-state"), "data-kind", kind === "good" && (failed || trouble) ? "warn" : kind);
}

// ---- events --------------------------------------------------------------------------------

const handlers = {
  hello({ server, version, viewer }) {
    complete = false;
    models.begin();
    byId("log").replaceChildren();
    put(byId("server-name"), server === "triton" ? "Naiad" : server);
    document.title = `${server === "triton" ? "Naiad" : server}`;
    put(byId("server-version"), version);
    detail.permissions = viewer.permissions;
    wantsLines = viewer.permissions.log.allowed;
    put(byId("log-title"), chosen ? `Log of ${chosen[0]}` : "Log of the server");
    put(byId("log-hint"), wantsLines ? "" : viewer.permissions.log.reason);
    byId("log").hidden = !wantsLines;
    const { allowed, reason } = viewer.permissions.regions;
    byId("regions-section").hidden = allowed; // until there are some
    put(byId("regions-hint"), allowed ? "" : reason);
    byId("regions-box").hidden = true;
    byId("key-headers").replaceChildren(...viewer.headers.map((name) => make("option", { value: name })));
    byId("keys-open").hidden = !viewer.headers.length && !keys.size;
    if (viewer.headers.length && !byId("key-header").value) byId("key-header").value = viewer.headers[0];
    showSettings(viewer.permissions);
  },
  history({ ages_ms: ages, server, model }) {
    for (const tile of TILES) if (tile.past) tile.history.fill(ages, server[tile.past]);
    if (chosen) detail.showPast(ages, model);
  },
  rows: (rows) => models.update(rows),
  gone: (gone) => models.remove(gone),
  detail: (found) => detail.update(found),
  traffic: (found) => showTraffic(found),
  recent: (found) => detail.showRecent(found),
  regions: showRegions,
  lines: showLines,
  server(value) {
    if (complete) models.arrange();
    else models.settle();
    complete = true;
    detail.tick(models.find(chosen));
    if (wantsScroll) showDetail();
    wantsScroll = false;
    showServer(value);
    showConnection("open", "");
  },
};

/** Show the front doors in processes of their own; `found` is null for a server without such. */
function showDoors(found) {
  byId("doors-section").hidden = !found;
  if (!found) return;
  put(byId("doors-hint"), `in processes of their own, ${counted(found.restarts, "restart")}`);
  byId("doors").replaceChildren(
    ...found.doors.map((door) =>
      make("tr", {}, make("td", {}, String(door.number)),
        make("td", {}, make("span", { class: "state", "data-kind": door.ready ? "good" : "bad" },
          door.ready ? "ready" : door.pid ? "starting" : "ended")),
        make("td", { class: "number" }, count(door.connections)), make("td", { class: "number" }, count(door.requests)),
        make("td", { class: "number" }, door.pid ? String(door.pid) : "–"),
        make("td", { class: "number" }, percent(door.cpu)),
        make("td", { class: "number" }, door.pid ? bytes(door.byte_size) : "–"))),
  );
}

function showRegions(regions) {
  byId("regions-section").hidden = byId("regions-box").hidden = !regions.length;
  put(byId("regions-hint"), `${counted(regions.length, "region")}, ` +
    bytes(regions.reduce((sum, region) => sum + region.byte_size, 0)));
  byId("regions").replaceChildren(
    ...regions.map((region) =>
      make("tr", {}, make("td", { class: "wrap" }, region.name), make("td", {}, region.kind),
        make("td", { class: "wrap" }, region.key), make("td", { class: "number" }, bytes(region.byte_size)),
        make("td", { class: "number" }, count(region.leases)))),
  );
}

function showLines(found) {
  const log = byId("log");
  const follows = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  log.append(
    ...found.map((line) =>
      make("li", {}, make("time", { datetime: new Date(line.at_s * 1000).toISOString() }, clockTime(line.at_s)),
        make("span", { class: line.level, title: { I: "information", W: "warning", E: "error" }[line.level] }, line.level),
        make("span", { class: line.level }, line.text))),
  );
  while (log.childElementCount > MOST_LINES) log.firstElementChild.remove();
  if (follows) log.scrollTop = log.scrollHeight;
}

function showConnection(state, text) {
  const notice = byId("notice");
  put(byId("connection"), state === "open" ? "live" : state === "paused" ? text : "not connected");
  notice.hidden = state === "open" || state === "paused";
  put(notice, state === "refused" ? `${text} (Keys)` : `${text}. Figures are those of the last contact; trying again.`);
  if (state === "refused") byId("keys-open").hidden = false;
}

const stream = new Stream((name, value) => handlers[name]?.(value), showConnection);

// ---- what is chosen ------------------------------------------------------------------------

function follow(focus) {
  const wanted = new URLSearchParams(location.hash.slice(1));
  chosen = wanted.get("model") ? [wanted.get("model"), wanted.get("version") ?? ""] : null;
  models.choose(chosen);
  detail.choose(chosen);
  stream.open(chosen);
  wantsScroll = Boolean(chosen) && !focus;
  if (!focus) return;
  byId(chosen ? "detail-title" : "models-title").focus({ preventScroll: true });
  if (chosen) showDetail();
}

function showDetail() {
  models.reveal();
  byId("detail").scrollIntoView({ block: "start" });
}

window.addEventListener("hashchange", () => follow(true));
byId("detail-close").addEventListener("click", () => {
  location.hash = "";
});

// ---- theme and keys ------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];

function storedTheme() {
  try {
    return localStorage.getItem("naiad-theme") ?? "system";
  } catch {
    return "system"; // the browser keeps nothing
  }
}

function setTheme(name) {
  const theme = THEMES.includes(name) ? name : "system";
  putAttribute(document.documentElement, "data-theme", theme === "system" ? "" : theme);
  put(byId("theme"), `Theme: ${theme}`);
  try {
    localStorage.setItem("naiad-theme", theme);
  } catch {
    // as above
  }
  return theme;
}

let theme = setTheme(storedTheme());
byId("theme").addEventListener("click", () => {
  theme = setTheme(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
});

function showKeys() {
  byId("keys-list").replaceChildren(
    ...[...keys.keys()].map((name) =>
      make("li", {}, `${name} `, make("button", { type: "button", onclick: () => useKey(name, null) }, "Forget"))),
  );
}

function useKey(name, value) {
  if (value == null) keys.delete(name);
  else keys.set(name, value);
  showKeys();
  stream.restart();
}

byId("keys-open").addEventListener("click", () => byId("keys").showModal());
byId("keys-close").addEventListener("click", () => byId("keys").close());
byId("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key-header").value.trim(), byId("key-value").value);
  byId("key-value").value = "";
  byId("keys").close();
});

follow(false);
