// Settings of the log and of traces, and loading a model by name: only what this client may change.

import { byId, inPath, jsonOf, make, put, send } from "./page.js";

let shown = "";

/** Show the forms that `permissions` allow. They are made again only if these have changed. */
export function showSettings(permissions) {
  const wanted = JSON.stringify([permissions.load, permissions.log_settings, permissions.trace_settings]);
  if (wanted === shown) return;
  shown = wanted;
  const forms = [];
  if (permissions.load.allowed) forms.push(loadForm());
  if (permissions.log_settings.allowed) forms.push(settingsForm("Log", "/v2/logging", logFields));
  if (permissions.trace_settings.allowed) forms.push(settingsForm("Traces", "/v2/trace/setting", traceFields));
  byId("settings").replaceChildren(...forms);
  byId("settings-section").hidden = !forms.length;
}

function loadForm() {
  const name = make("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const result = make("p", { role: "status" });
  const form = make("form", {}, make("label", {}, "Name", name), make("button", { type: "submit" }, "Load"), result);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    change(result, "loaded", () =>
      send(`/v2/repository/models/${inPath(name.value.trim())}/load`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: "{}",
      }));
  });
  return make("article", { class: "card" }, make("h3", {}, "Load a model"), form);
}

const logFields = (values) => ({
  log_verbose_level: make("input", { type: "number", min: 0, max: 9, value: values.log_verbose_level }),
  log_info: make("input", { type: "checkbox", checked: values.log_info }),
  log_warning: make("input", { type: "checkbox", checked: values.log_warning }),
  log_error: make("input", { type: "checkbox", checked: values.log_error }),
});

const traceFields = (values) => ({
  trace_level: choice(["OFF", "TIMESTAMPS", "TENSORS"], [values.trace_level].flat()[0]),
  trace_rate: make("input", { type: "number", min: 0, value: values.trace_rate }),
  trace_count: make("input", { type: "number", min: -1, value: values.trace_count }),
});

function choice(names, chosen) {
  return make("select", {}, ...names.map((name) => make("option", { selected: name === chosen }, name)));
}

/** Return a form for the settings at `path`. They are asked for when it is opened. */
function settingsForm(title, path, makeFields) {
  const result = make("p", { role: "status" });
  const form = make("form");
  const details = make("details", {}, make("summary", {}, "Show and change"), form, result);
  details.addEventListener("toggle", async () => {
    if (!details.open) return;
    put(result, "");
    try {
      const fields = makeFields(await jsonOf(await send(path)));
      const labels = Object.entries(fields).map(([name, field]) => make("label", { class: "block" }, `${name} `, field));
      form.replaceChildren(...labels, make("button", { type: "submit" }, "Change"));
      form.onsubmit = (event) => {
        event.preventDefault();
        const values = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, valueOf(name, field)]));
        const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(values) };
        change(result, "changed", () => send(path, options));
      };
    } catch (error) {
      put(result, error.message);
    }
  });
  return make("article", { class: "card" }, make("h3", {}, title), details);
}

function valueOf(name, field) {
  if (field.type === "checkbox") return field.checked;
  if (name === "trace_level") return [field.value];
  if (name.startsWith("trace_")) return field.value; // the protocol has these numbers as texts
  return Number(field.value);
}

async function change(result, done, request) {
  result.classList.remove("error-text");
  put(result, "waiting for the server");
  try {
    await jsonOf(await request());
    put(result, done);
  } catch (error) {
    result.classList.add("error-text");
    put(result, error.message);
  }
}
