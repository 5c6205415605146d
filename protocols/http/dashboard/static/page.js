// Small things that all parts of the page use. Text of models and clients becomes text nodes only, never HTML.

export const byId = (id) => document.getElementById(id);

/** Return a new element; `attributes` may have `class`, `data-…`, `onclick` and so on. Children are nodes or texts. */
export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, String(value));
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function makeSvg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Change the text of a node only if it is another one: screen readers and layout notice each change. */
export function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function putAttribute(node, name, value) {
  if (value == null || value === "") node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// ---- figures -------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en");

export function count(value) {
  return whole.format(Math.round(value));
}

/** Return a number of things, such as "1 instance" and "2 instances". */
export function counted(number, thing) {
  return `${count(number)} ${thing}${number === 1 ? "" : "s"}`;
}

export function rate(value) {
  if (value === 0) return "0";
  if (value < 10) return value.toFixed(1);
  return count(value);
}

export function milliseconds(value) {
  if (value == null) return "–";
  if (value < 1) return `${value.toFixed(2)} ms`;
  if (value < 100) return `${value.toFixed(1)} ms`;
  if (value < 10000) return `${count(value)} ms`;
  return duration(value);
}

export function duration(ms) {
  const seconds = Math.max(0, Math.round(ms / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function bytes(value) {
  let rest = value;
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (rest < 1024) return `${rest < 10 && unit !== "B" ? rest.toFixed(1) : Math.round(rest)} ${unit}`;
    rest /= 1024;
  }
  return `${rest.toFixed(1)} TiB`;
}

export function percent(share) {
  if (share == null) return "–";
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}

export function clockTime(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB");
}

// ---- requests of the page itself -----------------------------------------------------------

/** Headers with keys that the person has entered. They are kept in memory only. */
export const keys = new Map();

/** Send a request to this server, with the keys. */
export function send(path, options = {}) {
  return fetch(path, { cache: "no-store", ...options, headers: { ...Object.fromEntries(keys), ...options.headers } });
}

/** Return the JSON of a response; raise an error with the server's text. */
export async function jsonOf(response) {
  const text = await response.text();
  let found = {};
  try {
    found = text ? JSON.parse(text) : {};
  } catch {
    if (response.ok) throw new Error("the response is no JSON");
  }
  if (!response.ok) throw new Error(found.error || text || `status ${response.status}`);
  return found;
}

/** Return a name as it stands in a path. The server does not decode paths, so what may stand there stays. */
export function inPath(name) {
  return name.replace(/[^A-Za-z0-9._~!$&'()*+,;=:@-]/g, encodeURIComponent);
}

/** Return the path of a model in the API. */
export function modelPath(name, version = "") {
  const path = `/v2/models/${inPath(name)}`;
  return version ? `${path}/versions/${version}` : path;
}
