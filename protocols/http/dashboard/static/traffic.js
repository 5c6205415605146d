// The traffic between the versions of the chosen model: shares, a rollout, its shadow, rewards.

import { byId, count, counted, duration, make, percent, put } from "./page.js";

const PHASES = { loading: "warn", step: "good", paused: "warn", done: "good", aborted: "bad" };
const DECISIONS = { pass: "good", stop: "bad", inconclusive: "warn" };

/** Distances are shown from a hundredth of the tolerance to a thousand of them, each factor of ten with an equal width. */
const LEAST = -2;
const MOST = 3;

/** Show what the server says of the model's traffic; null hides all of it. */
export function showTraffic(found) {
  byId("traffic-card").hidden = !found;
  if (!found) return;
  const parts = [shares(found.targets)];
  if (found.rollout) parts.push(rollout(found.rollout));
  if (found.shadow) parts.push(shadow(found.shadow));
  if (found.feedback?.versions.length) parts.push(rewards(found.feedback));
  byId("traffic").replaceChildren(...parts.filter(Boolean));
  put(byId("traffic-source"), found.source === "none" ? "" : `set by ${found.source === "file" ? "traffic.toml" : "a client"}`);
}

function part(title, ...nodes) {
  return make("section", { class: "traffic-part" }, make("h4", {}, title), ...nodes);
}

/** What the guards say, each in a line of its own. Of a rollout that is over, only what its reason does not say already. */
function verdict(found) {
  const said = found.verdict;
  const over = found.phase === "done" || found.phase === "aborted";
  if (!said || (over && said.sentence === found.reason)) return null;
  return make("div", {},
    make("p", {}, over ? "Last verdict: " : "Verdict: ",
      make("span", { class: "state", "data-kind": DECISIONS[said.decision] }, said.decision)),
    make("ul", { class: "sentences" }, ...said.sentence.split("; ").map((each) => make("li", {}, each))));
}

function track(share, kind, label) {
  const fill = make("span", { class: `track-fill ${kind}` });
  fill.style.width = `${Math.min(100, 100 * share)}%`;
  return make("span", { class: "track", role: "img", "aria-label": label }, fill);
}

function shares(targets) {
  const weighed = targets.filter((each) => each.weight || each.trouble);
  if (!weighed.length) return null;
  return part("Shares", ...weighed.map((each, place) => make(
    "div", { class: "traffic-row" },
    make("span", { class: "traffic-name" }, each.text, " ", make("span", { class: "quiet" }, each.version ? `version ${each.version}` : "")),
    track(each.share / 10000, place ? "second" : "first", `${each.text}: ${percent(each.share / 10000)}`),
    make("b", { class: "traffic-value" }, percent(each.share / 10000)),
    each.trouble ? make("span", { class: "error-text traffic-note" }, each.trouble) : null,
  )));
}

function rollout(found) {
  const rows = Object.entries(found.guards).map(([name, each]) => make(
    "tr", {},
    make("td", {}, name),
    make("td", { class: "number" }, `${count(each.candidate_bad)} of ${count(each.candidate)}`),
    make("td", { class: "number" }, name === "outputs" ? "–" : `${count(each.stable_bad)} of ${count(each.stable)}`),
  ));
  // "paused at step 1" says already that it is paused
  const reason = found.described.startsWith(found.reason) ? [] : found.reason.split("; ");
  const section = part(
    `Rollout of version ${found.candidate} in place of ${found.stable}`,
    make("p", {},
      make("span", { class: "state", "data-kind": PHASES[found.phase] }, found.described),
      ` for ${duration(found.seconds_in_phase * 1000)}`, reason.length === 1 ? make("span", { class: "quiet" }, `, ${reason[0]}`) : null),
    reason.length > 1 ? make("ul", { class: "sentences quiet" }, ...reason.map((each) => make("li", {}, each))) : null,
    make("div", { class: "steps", role: "img", "aria-label": `step ${found.step} of ${found.steps.length}` },
      ...found.steps.map((share, place) => make(
        "span", { class: place + 1 < found.step || found.phase === "done" ? "step past" : place + 1 === found.step && found.phase !== "aborted" ? "step now" : "step" },
        `${share} %`))),
    verdict(found),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Bad events by guard" }, make("table", { class: "plain" },
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Bad events"),
        make("th", { scope: "col", class: "number" }, `Version ${found.candidate}`),
        make("th", { scope: "col", class: "number" }, `Version ${found.stable}`))),
      make("tbody", {}, ...rows))),
  );
  section.classList.add("traffic-rollout");
  return section;
}

/** The place of a distance in the plot, from 0 to 1. */
function placeOf(distance) {
  if (!(distance > 0)) return 0;
  return Math.min(1, Math.max(0, (Math.log10(distance) - LEAST) / (MOST - LEAST)));
}

function shadow(found) {
  const dropped = Object.entries(found.dropped).map(([reason, number]) => `${count(number)} (${reason})`);
  const plots = Object.entries(found.outputs).map(([name, each]) => {
    const different = Object.entries(each.different).map(([kind, number]) => `${count(number)} ${kind}`).join(", ");
    const { p50, p90, p99, largest } = each.distance;
    const plot = make("span", {
      class: "distances", role: "img",
      "aria-label": `distances in tolerances: half up to ${p50}, 90 % up to ${p90}, 99 % up to ${p99}, the largest ${largest}`,
    });
    for (const [kind, distance] of [["d99", p99], ["d90", p90], ["d50", p50]]) {
      const bar = make("span", { class: `distance ${kind}` });
      bar.style.width = `${100 * placeOf(distance)}%`;
      plot.append(bar);
    }
    const limit = make("span", { class: "distance-limit", title: "the tolerance" });
    limit.style.left = `${100 * placeOf(1)}%`;
    plot.append(limit);
    if (largest > 0) {
      const end = make("span", { class: largest > 1 ? "distance-largest bad" : "distance-largest", title: `the largest: ${largest}` });
      end.style.left = `${100 * placeOf(largest)}%`;
      plot.append(end);
    }
    return make("div", { class: "traffic-row" },
      make("span", { class: "traffic-name" }, name || "errors"), plot,
      make("span", { class: different ? "traffic-value some" : "traffic-value quiet" }, different || "equal"));
  });
  const state = found.active ? found.trouble : "it has ended";
  return part(
    `Shadow: ${found.to}`,
    make("p", {}, `${counted(found.pairs, "pair")} compared, `,
      make("b", { class: found.different ? "some" : "" }, `${count(found.different)} different`),
      state ? make("span", { class: found.trouble ? "error-text" : "quiet" }, found.trouble ? `: ${state}` : `, ${state}`) : null),
    dropped.length ? make("p", { class: "quiet" }, `Not compared: ${dropped.join(", ")}`) : null,
    ...plots,
    plots.length ? make("p", { class: "quiet legend" },
      "distance on a logarithmic scale: p50, p90 and p99, the line is the tolerance, the mark the largest") : null,
  );
}

function rewards(found) {
  const number = (value) => (Math.abs(value) >= 1000 ? count(value) : value.toPrecision(3));
  const interval = (ends) => (ends ? `${number(ends[0])} to ${number(ends[1])}` : "too few");
  return part("Rewards", make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Rewards by version" },
    make("table", { class: "plain" },
      make("thead", {}, make("tr", {}, ...["Version", "Rewards", "Mean", "95 %", "Difference, 95 %"].map((text, place) =>
        make("th", { scope: "col", class: place ? "number" : "" }, text)))),
      make("tbody", {}, ...found.versions.map((each) => make("tr", {},
        make("td", {}, `${each.model} ${each.version}`),
        make("td", { class: "number" }, count(each.rewards)),
        make("td", { class: "number" }, number(each.mean)),
        make("td", { class: "number" }, interval(each.interval)),
        make("td", { class: "number" }, each.difference ? interval(each.difference.interval) : "–")))))));
}
