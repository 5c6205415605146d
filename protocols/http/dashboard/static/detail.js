// Everything about the model version that a person has chosen.

import { bars, History, lines, waterfall } from "./charts.js";
import { endChat } from "./chat.js";
import { showExample } from "./example.js";
import { stateKind } from "./models.js";
import {
  byId, bytes, clockTime, count, counted, duration, inPath, jsonOf, make, milliseconds, percent, put, putAttribute, rate, send,
} from "./page.js";

const STAGES = ["queue", "input", "inference", "output"];
const STATE_KINDS = { idle: "good", busy: "good", apart: "warn", slow: "warn", stopped: "bad", lost: "bad" };
const STATE_TEXTS = { apart: "warming up or retiring", slow: "executes for long" };

export class Detail {
  constructor() {
    this.chosen = null;
    this.permissions = {};
    byId("load").addEventListener("click", () => this.act("load"));
    byId("unload").addEventListener("click", () => this.act("unload"));
  }

  /** Show another model version, or none (null). */
  choose(chosen) {
    this.chosen = chosen;
    this.rates = new History();
    this.errors = new History();
    this.halves = new History();
    this.tails = new History();
    this.tokens = new History();
    this.prompts = new History();
    this.firstHalves = new History();
    this.firstTails = new History();
    this.form = "";
    byId("detail").hidden = !chosen;
    document.body.classList.toggle("chosen", Boolean(chosen));
    put(byId("action-result"), "");
    for (const id of ["chart-rate", "chart-duration", "stages", "batches", "failures", "instances", "failed", "slow"]) {
      byId(id).replaceChildren();
    }
    put(byId("detail-facts"), "");
    put(byId("slow-limit"), "");
    byId("example").replaceChildren();
    byId("response").replaceChildren();
    byId("example-card").hidden = byId("traffic-card").hidden = true;
    endChat();
    byId("detail-language").hidden = true; // until text was generated
    byId("detail-loaded").hidden = byId("instances-card").hidden = true; // until a version is loaded
    if (chosen) put(byId("detail-title"), chosen[1] ? `${chosen[0]}, version ${chosen[1]}` : chosen[0]);
    for (const id of ["failed", "slow"]) byId(id).append(make("li", { class: "quiet" }, "none so far"));
  }

  /** What the server knows of the last two minutes: figures by name, null for a model that had no request. */
  showPast(ages, figures) {
    const none = ages.map(() => 0);
    this.rates.fill(ages, figures?.rate ?? none);
    this.errors.fill(ages, figures?.failure_rate ?? none);
    this.halves.fill(ages, figures?.p50_ms ?? ages.map(() => null));
    this.tails.fill(ages, figures?.p99_ms ?? ages.map(() => null));
  }

  /** A snapshot was received: `entry` is the model's row in the table, if it still has one. */
  tick(entry) {
    if (!this.chosen) return;
    const row = entry?.row ?? {};
    const reason = entry?.reason ?? "";
    const state = byId("detail-state");
    put(state, entry ? row.state || "not loaded" : "gone");
    putAttribute(state, "data-kind", entry ? stateKind(row.state) : "");
    const shown = byId("detail-reason");
    shown.hidden = !reason || reason === "unloaded";
    put(shown, reason);
    const ready = row.state === "READY";
    const may = this.permissions.load?.allowed;
    byId("load").hidden = !may;
    byId("unload").hidden = !may || !ready;
    put(byId("load"), ready ? "Load again" : "Load");
    this.rates.add(row.rate ?? 0);
    this.errors.add(row.failure_rate ?? 0);
    this.halves.add(row.p50_ms);
    this.tails.add(row.p99_ms);
    const now = row.rate ?? 0;
    const failing = row.failure_rate ?? 0;
    const [rates, scale] = lines([this.rates.values, this.errors.values],
      `${rate(now)} requests and ${rate(failing)} errors per second now`, rate, ["line-first", "line-bad"]);
    scale.prepend(
      make("span", {}, make("span", { class: "swatch first" }), "requests ", make("b", {}, rate(now))),
      make("span", {}, make("span", { class: "swatch bad" }), "errors ", make("b", {}, rate(failing))),
    );
    byId("chart-rate").replaceChildren(rates, scale);
    put(byId("batch-note"), row.batch != null && row.batch < 1
      ? `${row.batch.toFixed(2)} rows per execution: executions that failed are counted, their rows are not.` : "");
    const text = `p50 ${milliseconds(row.p50_ms)}, p99 ${milliseconds(row.p99_ms)} now`;
    const [chart, note] = lines([this.halves.values, this.tails.values], text, milliseconds);
    note.prepend(
      make("span", {}, make("span", { class: "swatch first" }), "p50 ", make("b", {}, milliseconds(row.p50_ms))),
      make("span", {}, make("span", { class: "swatch second" }), "p99 ", make("b", {}, milliseconds(row.p99_ms))),
    );
    byId("chart-duration").replaceChildren(chart, note);
  }

  update(detail) {
    byId("detail-loaded").hidden = byId("instances-card").hidden = false;
    const facts = [detail.backend];
    if (detail.max_batch_size) facts.push(`up to ${counted(detail.max_batch_size, "row")} in a batch`);
    if (detail.decoupled) facts.push("streams responses");
    if (detail.sequences) facts.push("sequences");
    facts.push(`loaded in ${milliseconds(detail.load_ms)}`);
    put(byId("detail-facts"), facts.filter(Boolean).join(" · "));
    this.showStages(detail.stages_ms);
    byId("batches").replaceChildren(...bars(detail.batches));
    this.showFailures(detail);
    this.showInstances(detail.instances);
    this.showLanguage(detail.language);
    put(byId("slow-limit"), detail.slow_ms == null ? "" : `now above ${milliseconds(detail.slow_ms)}`);
    const form = JSON.stringify([detail.name, detail.version, detail.decoupled, detail.sequences]);
    if (form !== this.form) {
      this.form = form;
      byId("example-card").hidden = false;
      showExample(detail, this.permissions);
    }
  }

  showStages(stages) {
    if (!stages) {
      byId("stages").replaceChildren(make("p", { class: "quiet" }, "no request"));
      return;
    }
    let at = 0;
    const parts = stages.map((took, place) => [STAGES[place], at, (at += took)]);
    byId("stages").replaceChildren(...waterfall(parts, at));
  }

  showFailures({ failures, refused }) {
    const names = {
      REJECTED: "waited too long in the queue", CANCELED: "cancelled by their clients", BACKEND: "the model failed",
      OTHER: "other reasons",
    };
    const parts = [...Object.entries(failures), ["refused", refused]].flatMap(([reason, number]) => [
      make("dt", {}, names[reason] ?? (reason === "refused" ? "refused: the queue or a quota was full" : reason)),
      make("dd", { class: number ? "some" : "quiet" }, count(number)),
    ]);
    byId("failures").replaceChildren(...parts);
  }

  /** Figures of the text that the model has generated over OpenAI's API; null if there was none. */
  showLanguage(found) {
    byId("detail-language").hidden = !found;
    if (!found) return;
    const swatch = (kind, name, figure) => make("span", {}, make("span", { class: `swatch ${kind}` }), `${name} `, make("b", {}, figure));
    this.tokens.add(found.tokens_per_s);
    this.prompts.add(found.prompt_tokens_per_s);
    const [tokens, tokensNote] = lines([this.tokens.values, this.prompts.values],
      `${rate(found.tokens_per_s)} tokens generated and ${rate(found.prompt_tokens_per_s)} tokens of prompts per second now`, rate);
    tokensNote.prepend(swatch("first", "generated", rate(found.tokens_per_s)), swatch("second", "prompts", rate(found.prompt_tokens_per_s)));
    byId("chart-tokens").replaceChildren(tokens, tokensNote);
    this.firstHalves.add(found.first_p50_ms);
    this.firstTails.add(found.first_p99_ms);
    const [first, firstNote] = lines([this.firstHalves.values, this.firstTails.values],
      `p50 ${milliseconds(found.first_p50_ms)}, p99 ${milliseconds(found.first_p99_ms)} to the first token now`, milliseconds);
    firstNote.prepend(swatch("first", "p50", milliseconds(found.first_p50_ms)), swatch("second", "p99", milliseconds(found.first_p99_ms)));
    byId("chart-first").replaceChildren(first, firstNote);
    const pairs = [
      ["open streams", count(found.open_streams)],
      ["between tokens, p50 and p99", `${milliseconds(found.pause_p50_ms)}, ${milliseconds(found.pause_p99_ms)}`],
      ["tokens generated", count(found.tokens)],
      ["tokens of prompts", count(found.prompt_tokens)],
      ["clients that left early", count(found.cancelled)],
    ];
    byId("language").replaceChildren(...pairs.flatMap(([name, figure]) => [make("dt", {}, name), make("dd", {}, figure)]));
  }

  showInstances(instances) {
    const rows = instances.map((each) =>
      make(
        "tr",
        {},
        make("td", { class: "wrap" }, each.name,
          each.host ? make("div", { class: "quiet" }, `on host ${each.host}`) : null),
        make("td", { class: "wrap" },
          make("span", { class: "state", "data-kind": STATE_KINDS[each.state] }, STATE_TEXTS[each.state] ?? each.state),
          each.condition ? make("div", { class: "quiet" }, each.condition) : null),
        make("td", { class: "number" }, count(each.batches ?? 0)),
        make("td", { class: "number" }, each.pid ? String(each.pid) : "–"),
        make("td", { class: "number" }, percent(each.cpu)),
        make("td", { class: "number" }, each.byte_size ? bytes(each.byte_size) +
          (each.device_byte_size ? ` + ${bytes(each.device_byte_size)} on devices` : "") : "–"),
        make("td", { class: "number" }, count(each.restarts ?? 0)),
      ),
    );
    if (!rows.length) rows.push(make("tr", {}, make("td", { colspan: 7, class: "quiet" }, "no instances")));
    byId("instances").replaceChildren(...rows);
  }

  showRecent({ slow, failed }) {
    byId("failed").replaceChildren(...requests(failed));
    byId("slow").replaceChildren(...requests(slow));
  }

  async act(verb) {
    const [name] = this.chosen;
    const result = byId("action-result");
    if (verb === "unload" && !window.confirm(`Unload the model '${name}'? Requests to it will fail.`)) return;
    put(result, `${verb}: waiting for the server`);
    result.classList.remove("error-text");
    try {
      await jsonOf(await send(`/v2/repository/models/${inPath(name)}/${verb}`, {
        method: "POST", headers: { "Content-Type": "application/json" }, body: "{}",
      }));
      put(result, verb === "load" ? "loaded" : "being unloaded");
    } catch (error) {
      result.classList.add("error-text");
      put(result, `${verb} failed: ${error.message}`);
    }
  }
}

function requests(list) {
  if (!list.length) return [make("li", { class: "quiet" }, "none so far")];
  return list.map((each) => {
    const facts = [];
    if (each.instance) facts.push(`on ${each.instance}`);
    if (each.batch_requests > 1) facts.push(`batch of ${each.batch_requests} requests, ${each.batch_rows} rows`);
    else if (each.rows > 1) facts.push(`${each.rows} rows`);
    if (each.batch_requests && each.closed_by !== "alone") facts.push(`batch closed: ${each.closed_by}`);
    if (each.reason) facts.push(each.reason);
    if (each.repeats) facts.push(`and ${count(each.repeats)} more like it`);
    facts.push(`version ${each.version}`);
    const at = new Date(Date.now() - each.ago_ms);
    return make(
      "li",
      {},
      make("div", { class: "head" },
        make("span", { class: "took" }, milliseconds(each.total_ms)),
        make("time", { class: "quiet", datetime: at.toISOString(), title: `${duration(each.ago_ms)} before the last change` },
          clockTime(at.getTime() / 1000)),
        each.id ? make("span", { class: "id" }, `id ${each.id}`) : null,
        make("span", { class: "quiet" }, facts.join(" · "))),
      each.error ? make("div", { class: "error" }, each.error) : null,
      ...(each.stages.length || !each.error ? waterfall(each.stages, each.total_ms, each.instance) : []),
    );
  });
}

