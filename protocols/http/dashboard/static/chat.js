// A small conversation with a model that takes whole requests of OpenAI's API (`openai_request`).
//
// The page asks the model at its own port: OpenAI's has another one, and the page loads nothing from elsewhere.

import { byId, count, jsonOf, make, milliseconds, modelPath, put, send } from "./page.js";

const MOST_SAID = 100; // messages that are kept, and sent again
const PAUSE_MS = 50; // how often a response that comes is drawn

let current = null; // the conversation that is shown

/** Show a conversation with a model version if it is one that chats. */
export function showChat(detail, metadata) {
  const has = (tensors, names) => tensors.some((tensor) => names.includes(tensor.name) && tensor.datatype === "BYTES");
  const chats = has(metadata.inputs, ["openai_request"]) && has(metadata.outputs, ["text_output", "openai_response"]);
  byId("chat-card").hidden = !chats;
  current?.stop();
  current = chats ? new Chat(detail) : null;
}

/** Another model, or none, is shown from now on. */
export function endChat() {
  byId("chat-card").hidden = true;
  current?.stop();
  current = null;
}

class Chat {
  constructor(detail) {
    this.path = `${modelPath(detail.name, detail.version)}/generate_stream`;
    this.model = detail.name;
    this.said = [];
    this.system = make("input", { autocomplete: "off", placeholder: "none", class: "system" });
    this.text = make("textarea", { rows: 2, "aria-label": "Message", placeholder: "Message; Enter sends it, Shift+Enter begins a line" });
    this.limit = make("input", { type: "number", min: 1, class: "classes", placeholder: "none" });
    this.button = make("button", { type: "submit", class: "main" }, "Send");
    this.stopButton = make("button", { type: "button", disabled: true, onclick: () => this.stop() }, "Stop");
    this.anew = make("button", { type: "button", onclick: () => this.reset() }, "New conversation");
    this.note = make("span", { class: "quiet", role: "status" });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    const form = byId("chat");
    form.onsubmit = (event) => {
      event.preventDefault();
      this.submit();
    };
    byId("chat-said").replaceChildren();
    form.replaceChildren(
      this.text,
      make("div", { class: "bar" }, make("label", {}, "System message", this.system), make("label", {}, "Most tokens", this.limit)),
      make("div", { class: "bar" }, this.button, this.stopButton, this.anew, this.note),
    );
  }

  stop() {
    this.abort?.abort();
  }

  reset() {
    this.stop();
    this.said = [];
    byId("chat-said").replaceChildren();
    put(this.note, "");
  }

  /** Return a new line of the conversation, in view. */
  line(who, text) {
    const shown = make("div", { class: "text" }, text);
    const list = byId("chat-said");
    list.append(make("li", { "data-who": who }, make("span", { class: "who quiet" }, who), shown));
    list.scrollTop = list.scrollHeight;
    return shown;
  }

  async submit() {
    const text = this.text.value.trim();
    if (!text || this.abort) return;
    this.text.value = "";
    this.line("you", text);
    const asked = [...this.said, { role: "user", content: text }].slice(-MOST_SAID);
    const answer = new Answer(this.line(this.model, ""));
    this.abort = new AbortController();
    this.button.disabled = true;
    this.stopButton.disabled = false;
    put(this.note, "waiting for the model");
    try {
      await this.ask(asked, answer);
    } catch (error) {
      if (error.name === "AbortError") answer.note = "stopped";
      else answer.fail(error.message);
    }
    answer.draw();
    if (answer.text) this.said = [...asked, { role: "assistant", content: answer.text }];
    put(this.note, answer.summary());
    this.abort = null;
    this.button.disabled = false;
    this.stopButton.disabled = true;
  }

  async ask(asked, answer) {
    const told = this.system.value.trim();
    const body = { model: this.model, messages: told ? [{ role: "system", content: told }, ...asked] : asked, stream: true };
    if (Number(this.limit.value) > 0) body.max_tokens = Number(this.limit.value);
    const response = await send(this.path, {
      method: "POST", body: JSON.stringify({ openai_request: JSON.stringify(body) }),
      headers: { "Content-Type": "application/json" }, signal: this.abort.signal,
    });
    if (!response.ok) await jsonOf(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) answer.take(JSON.parse(event.replace(/^data: /, "")));
      put(this.note, answer.summary());
    }
  }
}

/** What has come of one response. */
class Answer {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.note = "";
    this.tokens = 0;
    this.begin = performance.now();
    this.first = null;
    this.drawn = 0;
  }

  take(event) {
    if (event.error) throw new Error(event.error);
    const made = event.openai_response == null ? null : JSON.parse(event.openai_response);
    const choice = made?.choices?.[0];
    const text = made ? (choice?.delta ?? choice?.message)?.content ?? "" : event.text_output ?? "";
    this.tokens += event.num_output_tokens ?? (text ? 1 : 0);
    if (text && this.first == null) this.first = performance.now() - this.begin;
    this.text += text;
    if ((choice?.finish_reason ?? event.finish_reason) === "length") this.note = "cut off at the limit";
    if (performance.now() - this.drawn > PAUSE_MS) this.draw();
  }

  draw() {
    this.drawn = performance.now();
    put(this.node, this.text);
    const list = byId("chat-said");
    list.scrollTop = list.scrollHeight;
  }

  fail(message) {
    this.node.after(make("p", { class: "error-text" }, message));
  }

  summary() {
    if (this.first == null) return this.note;
    const took = performance.now() - this.begin;
    const speed = `${count(this.tokens)} tokens, ${(this.tokens / (took / 1000)).toFixed(1)} a second, first after ${milliseconds(this.first)}`;
    return this.note ? `${speed}; ${this.note}` : speed;
  }
}
