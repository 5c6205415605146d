// Small charts in SVG, without a library.

import { count, counted, make, makeSvg, milliseconds } from "./page.js";

const WIDTH = 300;
export const POINTS = 120; // two minutes

/** Keeps the last values of one figure. */
export class History {
  constructor() {
    this.values = [];
  }

  /** Begin with samples of the server: their ages in milliseconds, oldest first, and their values. */
  fill(ages, samples) {
    this.values = [];
    if (!ages.length) return;
    let next = 0;
    for (let second = Math.min(Math.floor(ages[0] / 1000), POINTS - 1); second > 0; second--) {
      while (next < ages.length - 1 && ages[next] > second * 1000) next += 1; // the sample that was taken after this time
      this.values.push(samples[next]);
    }
  }

  add(value) {
    this.values.push(value);
    if (this.values.length > POINTS) this.values.shift();
  }
}

/** Return a line without axes, for the ground of a tile. */
export function sparkline(values) {
  const svg = makeSvg("svg", { viewBox: `0 0 ${WIDTH} 30`, preserveAspectRatio: "none", "aria-hidden": "true" });
  const most = Math.max(...values, 0);
  if (values.length < 2 || most <= 0) return svg;
  const line = path(values, most, 28, 30);
  svg.append(
    makeSvg("path", { class: "area-first", d: `${line} L${WIDTH} 30 L${at(0, values.length)} 30 Z` }),
    makeSvg("path", { class: "line-first", d: line }),
  );
  return svg;
}

/**
 * Return a chart of one or two lines over the last two minutes. `label` is for screen readers, `kinds` are the classes of
 * the lines.
 */
export function lines(series, label, format, kinds = ["line-first", "line-second"]) {
  const height = 84;
  const svg = makeSvg("svg", {
    class: "chart", viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label,
  });
  const most = niceTop(Math.max(...series.flatMap((values) => values.map((value) => value ?? 0)), 0));
  for (const share of [0, 0.5, 1]) {
    const y = height - 2 - share * (height - 6);
    svg.append(makeSvg("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y }));
  }
  series.forEach((values, place) => {
    if (values.length > 1) {
      const line = path(values, most, height - 6, height - 2);
      if (line) svg.append(makeSvg("path", { class: kinds[place], d: line }));
    }
  });
  return [svg, make("div", { class: "legend" }, `0 to ${format(most)}, two minutes`)];
}

/** The right end of a chart is now. */
function at(place, length) {
  return (WIDTH * (POINTS - length + place)) / (POINTS - 1);
}

/** Return the path through `values`; null is a gap. */
function path(values, most, height, bottom) {
  let text = "";
  let gap = true;
  values.forEach((value, place) => {
    if (value == null) {
      gap = true;
      return;
    }
    const y = bottom - (Math.min(value, most) / (most || 1)) * height;
    text += `${gap ? "M" : "L"}${at(place, values.length).toFixed(1)} ${y.toFixed(1)} `;
    gap = false;
  });
  return text.trim();
}

/** Return a round number that is not below `most`. */
function niceTop(most) {
  if (most <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= most);
}

/** Return bars for [rows, number] pairs, at most 16: neighbours are joined where there are more. */
export function bars(pairs) {
  if (!pairs.length) return [make("p", { class: "quiet" }, "no execution")];
  const size = Math.ceil(pairs.length / 16);
  const groups = [];
  for (let place = 0; place < pairs.length; place += size) {
    const group = pairs.slice(place, place + size);
    const name = group.length > 1 ? `${group[0][0]}–${group.at(-1)[0]}` : String(group[0][0]);
    groups.push([name, group.reduce((sum, [, number]) => sum + number, 0)]);
  }
  const most = Math.max(...groups.map(([, number]) => number));
  const text = groups.map(([name, number]) => `${count(number)} with ${name} row${name === "1" ? "" : "s"}`).join(", ");
  const svg = makeSvg("svg", { class: "chart", viewBox: `0 0 ${WIDTH} 100`, role: "img", "aria-label": text });
  const step = Math.min(WIDTH / groups.length, 60);
  groups.forEach(([name, number], place) => {
    const height = Math.max((number / most) * 74, 1.5);
    const x = place * step;
    const title = makeSvg("title");
    title.textContent = `${name} row${name === "1" ? "" : "s"}: ${counted(number, "execution")}`;
    const rect = makeSvg("rect", {
      class: "bar-part", x: x + 2, y: 84 - height, width: Math.max(step - 4, 2), height, rx: 1.5,
    });
    rect.append(title);
    const label = makeSvg("text", { x: x + step / 2, y: 97, "text-anchor": "middle" });
    label.textContent = name;
    svg.append(rect, label);
  });
  return [svg];
}

/**
 * Return a bar of the stages of a request, [name, begin, end] in milliseconds of `total`, and what they took.
 * `instance` is the name of the one that executed it, if that is known.
 */
export function waterfall(stages, total, instance = "") {
  const known = stages.length ? stages : [["unknown", 0, total]];
  const parts = known.map(([name, begin, end]) => `${name} ${milliseconds(end - begin)}`).join(", ");
  const text = instance ? `on ${instance}: ${parts}` : parts;
  const svg = makeSvg("svg", {
    class: "waterfall", viewBox: `0 0 1000 12`, preserveAspectRatio: "none", role: "img", "aria-label": text,
  });
  for (const [name, begin, end] of known) {
    const x = (begin / (total || 1)) * 1000;
    const width = Math.max(((end - begin) / (total || 1)) * 1000, 1.5);
    svg.append(makeSvg("rect", { class: `stage-${name}`, x, y: 0, width, height: 12 }));
  }
  return [svg, legend(known.map(([name, begin, end]) => [name, end - begin]))];
}

/** Return what the colours of stages mean: [name, milliseconds] pairs. */
export function legend(parts) {
  return make(
    "div",
    { class: "legend" },
    ...parts.map(([name, took]) =>
      make("span", {}, make("span", { class: `swatch stage-${name}` }), `${name} `, make("b", {}, milliseconds(took))),
    ),
  );
}
