// The event stream. It is read with fetch and not with EventSource, which can send no keys and shows no error texts.

import { send } from "./page.js";

const HIDDEN_MS = 30000; // a page that nobody sees costs the server nothing
const SILENCE_MS = 40000; // longer than the server ever waits between two events

export class Stream {
  /** `onEvent(name, value)` gets each event, `onState(state, text)` what becomes of the connection. */
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.query = "";
    this.abort = null;
    this.number = 0;
    this.retry = null;
    this.hiding = null;
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  /** Begin anew, with the details of a model: ["name", "version"], or of none. */
  open(chosen) {
    this.query = chosen ? `?model=${encodeURIComponent(chosen[0])}&version=${encodeURIComponent(chosen[1])}` : "";
    this.restart();
  }

  restart() {
    this.close();
    this.run(++this.number, 1000);
  }

  close() {
    this.number += 1;
    clearTimeout(this.retry);
    if (this.abort) this.abort.abort();
    this.abort = null;
  }

  visibilityChanged() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => {
        this.close();
        this.onState("paused", "paused while the page is hidden");
      }, HIDDEN_MS);
    } else if (!this.abort) {
      this.restart();
    }
  }

  async run(number, waitMs) {
    const abort = (this.abort = new AbortController());
    let refused = false;
    let received = false;
    let text = "the connection was lost";
    try {
      const response = await send(`/dashboard/events${this.query}`, { signal: abort.signal });
      if (!response.ok) {
        const body = await response.text();
        refused = response.status === 403;
        text = body;
        try {
          text = JSON.parse(body).error;
        } catch {
          // the text itself
        }
      } else {
        received = true;
        await this.read(response.body.getReader(), number, abort);
      }
    } catch {
      // aborted, or the server is gone
    }
    if (number !== this.number) return;
    this.onState(refused ? "refused" : "lost", text);
    const nextMs = received ? 1000 : Math.min(waitMs * 2, 10000);
    this.retry = setTimeout(() => number === this.number && this.run(number, nextMs), nextMs);
  }

  async read(reader, number, abort) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const silence = setTimeout(() => abort.abort(), SILENCE_MS);
      const { done, value } = await reader.read();
      clearTimeout(silence);
      if (done || number !== this.number) return;
      rest += decoder.decode(value, { stream: true });
      const events = rest.split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const [first, second] = event.split("\n", 2);
        this.onEvent(first.slice("event: ".length), JSON.parse(second.slice("data: ".length)));
      }
    }
  }
}
