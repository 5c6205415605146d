// A form that sends an example request, made from the model's metadata, and shows the response.

import { showChat } from "./chat.js";
import { byId, bytes, counted, jsonOf, make, milliseconds, modelPath, put, send } from "./page.js";
import { encodeInputs, exampleText, parseValues } from "./tensors.js";
import { picturePlan, readPicture } from "./pictures.js";
import { sampleClasses, sampleOf } from "./samples.js";

const MOST_EVENTS = 200;
const MOST_TEXT = 8000;
const SHOWN_ELEMENTS = 512;

let current = 0; // the number of the form: what comes late for another one is dropped

/** Show the form for a model version; `detail` says how it wants its requests. */
export async function showExample(detail, permissions) {
  const number = ++current;
  const form = byId("example");
  byId("response").replaceChildren();
  const refusal = [permissions.metadata, permissions.infer].find((each) => !each.allowed);
  if (refusal) {
    form.replaceChildren(make("p", { class: "quiet" }, refusal.reason));
    return;
  }
  let metadata;
  try {
    metadata = await jsonOf(await send(modelPath(detail.name, detail.version)));
  } catch (error) {
    if (number === current) form.replaceChildren(make("p", { class: "quiet" }, error.message));
    return;
  }
  if (number !== current) return;
  form.replaceChildren(...new ExampleForm(detail, metadata).nodes());
  showChat(detail, metadata);
}

class ExampleForm {
  constructor(detail, metadata) {
    this.detail = detail;
    this.inputs = metadata.inputs.map((tensor) => new InputFields(detail.name, tensor));
    this.outputs = metadata.outputs.map((tensor) => tensor.name);
    this.classes = make("input", { type: "number", min: 0, max: 1000, value: sampleClasses(detail.name, metadata.inputs), class: "classes" });
    this.button = make("button", { type: "submit", class: "main" }, "Send");
    this.stop = make("button", { type: "button", hidden: true, onclick: () => this.abort?.abort() }, "Stop");
  }

  nodes() {
    const form = byId("example");
    form.onsubmit = (event) => {
      event.preventDefault();
      this.submit();
    };
    const classes = this.detail.decoupled ? null :
      make("label", { title: "the best classes instead of the tensor; 0 for the tensor" }, "Best classes", this.classes);
    return [...this.inputs.map((input) => input.node), make("div", { class: "bar" }, classes, this.button, this.stop)];
  }

  async submit() {
    const shown = byId("response");
    shown.replaceChildren(make("p", { class: "quiet" }, "waiting for the response"));
    this.button.disabled = true;
    this.abort = new AbortController();
    const begin = performance.now();
    try {
      const inputs = this.inputs.map((input) => input.read());
      if (this.detail.decoupled) await this.stream(inputs, shown, begin);
      else await this.infer(inputs, shown, begin);
    } catch (error) {
      const text = error.name === "AbortError" ? "stopped" : error.message;
      shown.replaceChildren(make("p", { class: "error-text" }, text));
    }
    this.button.disabled = false;
    this.stop.hidden = true;
  }

  async infer(inputs, shown, begin) {
    const request = {};
    if (this.detail.sequences) {
      const id = 1 + Math.floor(Math.random() * 2 ** 31);
      request.parameters = { sequence_id: id, sequence_start: true, sequence_end: true };
    }
    const best = Number(this.classes.value) || 0;
    const { body, headers } = encodeInputs(request, inputs, best, this.outputs);
    const response = await send(`${modelPath(this.detail.name, this.detail.version)}/infer`, {
      method: "POST", body, headers: { ...headers, "X-Naiad-Explain": "1" }, signal: this.abort.signal,
    });
    const found = await jsonOf(response);
    const took = performance.now() - begin;
    shown.replaceChildren(
      make("p", {}, make("b", {}, `Response after ${milliseconds(took)}`), ` ${explained(found.parameters)}`),
      ...(found.outputs ?? []).flatMap(outputNodes),
    );
  }

  async stream(inputs, shown, begin) {
    const request = {};
    for (const input of inputs) {
      if (input.file) throw new Error(`input '${input.name}': files cannot be sent to models that stream`);
      request[input.name] = input.data.length === 1 ? input.data[0] : input.data;
    }
    this.stop.hidden = false;
    const response = await send(`${modelPath(this.detail.name, this.detail.version)}/generate_stream`, {
      method: "POST", body: JSON.stringify(request), headers: { "Content-Type": "application/json" },
      signal: this.abort.signal,
    });
    if (!response.ok) await jsonOf(response);
    const head = make("p", {}, "");
    const text = make("pre", {}, "");
    shown.replaceChildren(head, text);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    let number = 0;
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        number += 1;
        if (number <= MOST_EVENTS) text.append(`${event.replace(/^data: /, "")}\n`);
      }
      put(head, counted(number, "response"));
    }
    put(head, `${counted(number, "response")} in ${milliseconds(performance.now() - begin)}` +
      (number > MOST_EVENTS ? `; the first ${MOST_EVENTS} are shown` : ""));
  }
}

/** Return in words how the request has travelled. */
function explained(parameters = {}) {
  const parts = [];
  if (parameters.naiad_instance) parts.push(`executed by ${parameters.naiad_instance}`);
  if (parameters.naiad_batch_size > 1) parts.push(`in a batch of ${parameters.naiad_batch_size} rows`);
  if (parameters.naiad_queue_ns != null) parts.push(`queued ${milliseconds(parameters.naiad_queue_ns / 1e6)}`);
  if (parameters.naiad_compute_infer_ns != null) {
    parts.push(`computed ${milliseconds(parameters.naiad_compute_infer_ns / 1e6)}`);
  }
  return parts.join(", ");
}

function outputNodes(output) {
  const data = JSON.stringify(output.data ?? []);
  const cut = data.length > MOST_TEXT ? `${data.slice(0, MOST_TEXT)} … (${data.length} characters)` : data;
  return [
    make("div", {}, make("b", {}, output.name), " ",
      make("span", { class: "quiet" }, `${output.datatype} [${output.shape.join(", ")}]`)),
    make("pre", {}, cut),
  ];
}

/** The fields of one input. */
class InputFields {
  constructor(model, tensor) {
    this.tensor = tensor;
    this.file = null;
    const shape = tensor.shape.map((dim) => (dim === -1 ? 1 : dim));
    this.shape = make("input", { value: shape.join(", "), size: 14, spellcheck: "false", "aria-label": `shape of ${tensor.name}` });
    this.values = make("textarea", {
      spellcheck: "false", rows: 3, "aria-label": `values of ${tensor.name}`,
      placeholder: tensor.datatype === "BYTES" ? "text" : "empty: all elements are 0",
    });
    const elements = shape.reduce((product, dim) => product * dim, 1);
    const sample = sampleOf(model, tensor.name, elements);
    if (sample) this.values.value = JSON.stringify(sample);
    else if (elements <= SHOWN_ELEMENTS) this.values.value = exampleText(tensor.datatype, shape);
    this.fileInput = make("input", { type: "file", onchange: () => this.take(this.fileInput.files[0]) });
    this.plan = picturePlan(tensor);
    const takesBytes = tensor.datatype === "BYTES";
    this.note = make("span", { class: "quiet", role: "status" });
    this.most = make("input", { type: "number", value: 255, step: "any", size: 6 });
    this.inverted = make("input", { type: "checkbox" });
    const fields = [
      make("legend", {}, tensor.name, " ", make("span", { class: "quiet" }, `${tensor.datatype} [${tensor.shape.join(", ")}]`)),
      make("label", {}, "Shape", this.shape),
    ];
    if (takesBytes || this.plan) {
      fields.push(make("label", {}, takesBytes ? "Picture, audio or other file" : "Picture", this.fileInput));
      if (!takesBytes) {
        fields.push(make("label", {}, "white is", this.most), make("label", {}, this.inverted, "inverted"));
      }
      fields.push(this.note);
    }
    fields.push(this.values);
    this.node = make("fieldset", {}, ...fields);
    if (takesBytes || this.plan) this.makeDropZone();
  }

  makeDropZone() {
    put(this.note, "or drop one here");
    this.node.addEventListener("dragover", (event) => {
      event.preventDefault();
      this.node.classList.add("over");
    });
    this.node.addEventListener("dragleave", () => this.node.classList.remove("over"));
    this.node.addEventListener("drop", (event) => {
      event.preventDefault();
      this.node.classList.remove("over");
      this.take(event.dataTransfer.files[0]);
    });
  }

  async take(file) {
    if (!file) return;
    try {
      if (this.plan) {
        const { shape, values } = await readPicture(file, this.plan, Number(this.most.value) || 255, this.inverted.checked);
        this.shape.value = shape.join(", ");
        this.values.value = JSON.stringify(values);
        put(this.note, `${file.name}: ${shape.join(" × ")} values`);
        return;
      }
      this.file = new Uint8Array(await file.arrayBuffer());
      this.values.value = "";
      put(this.note, `${file.name}, ${bytes(this.file.length)}`);
    } catch (error) {
      put(this.note, `'${file.name}' cannot be read: ${error.message}`);
    }
  }

  /** Return name, datatype, shape, and either `data` (a flat list) or `file` (bytes). */
  read() {
    const { name, datatype } = this.tensor;
    const shape = this.shape.value.split(/[,\s]+/).filter(Boolean).map(Number);
    if (shape.some((dim) => !Number.isInteger(dim) || dim < 0)) {
      throw new Error(`the shape of '${name}' is to be whole numbers with commas between them`);
    }
    const elements = shape.reduce((product, dim) => product * dim, 1);
    if (this.file && !this.values.value) {
      if (elements !== 1) throw new Error(`'${name}' has ${elements} elements, and a file is one: change its shape`);
      return { name, datatype, shape, file: this.file };
    }
    return { name, datatype, shape, data: parseValues(name, datatype, this.values.value, elements) };
  }
}
