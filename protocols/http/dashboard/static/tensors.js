// Values that a person writes, as tensors of a request: in JSON, or as bytes where JSON cannot carry them.

const REALS = new Set(["FP16", "BF16", "FP32", "FP64"]);
const NO_JSON = new Set(["FP16", "BF16"]);
const MOST_ELEMENTS = 4_000_000;

/** Return the text of an example with this shape. */
export function exampleText(datatype, shape) {
  const elements = shape.reduce((product, dim) => product * dim, 1);
  if (datatype === "BYTES") return elements === 1 ? "text" : JSON.stringify(Array(elements).fill("text"));
  const value = datatype === "BOOL" ? true : REALS.has(datatype) ? 0.5 : 1;
  return JSON.stringify(Array(elements).fill(value));
}

/** Return a flat list of `elements` values. Raises an error that says what is wrong. */
export function parseValues(name, datatype, text, elements) {
  if (elements > MOST_ELEMENTS) throw new Error(`'${name}' would have ${elements} elements, which is too many for a page`);
  if (datatype === "BYTES") return parseTexts(name, text, elements);
  const zero = datatype === "BOOL" ? false : 0;
  if (!text.trim()) return Array(elements).fill(zero);
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    try {
      found = JSON.parse(`[${text.trim().replace(/^,|,$/g, "").split(/[,\s]+/).join(",")}]`);
    } catch {
      throw new Error(`the values of '${name}' are to be numbers with commas between them, or JSON`);
    }
  }
  const values = Array.isArray(found) ? found.flat(Infinity) : [found];
  if (values.length === 1 && elements > 1) return Array(elements).fill(values[0]);
  if (values.length !== elements) {
    throw new Error(`'${name}' has ${values.length} values, and its shape wants ${elements}`);
  }
  return values;
}

function parseTexts(name, text, elements) {
  if (elements === 1 && !text.trim().startsWith("[")) return [text];
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    found = text.split("\n");
  }
  const values = (Array.isArray(found) ? found.flat(Infinity) : [found]).map(String);
  if (values.length !== elements) {
    throw new Error(`'${name}' has ${values.length} texts, and its shape wants ${elements}: one on each line, or JSON`);
  }
  return values;
}

/**
 * Return body and headers of an inference request. `request` has what is not an input. If an input cannot be sent in
 * JSON, the body has bytes behind the JSON (the binary tensor extension).
 */
export function encodeInputs(request, inputs, bestClasses, outputNames = []) {
  const parts = [];
  const described = inputs.map(({ name, datatype, shape, data, file }) => {
    const raw = file ? lengthPrefixed(file) : NO_JSON.has(datatype) ? halves(datatype, data) : null;
    if (!raw) return { name, datatype, shape, data };
    parts.push(raw);
    return { name, datatype, shape, parameters: { binary_data_size: raw.length } };
  });
  const document = { ...request, inputs: described };
  if (bestClasses > 0) {
    document.outputs = outputNames.map((name) => ({ name, parameters: { classification: bestClasses } }));
  }
  const head = new TextEncoder().encode(JSON.stringify(document));
  if (!parts.length) return { body: head, headers: { "Content-Type": "application/json" } };
  return {
    body: new Blob([head, ...parts]),
    headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(head.length) },
  };
}

/** Return one element of datatype BYTES. */
function lengthPrefixed(octets) {
  const found = new Uint8Array(4 + octets.length);
  new DataView(found.buffer).setUint32(0, octets.length, true);
  found.set(octets, 4);
  return found;
}

function halves(datatype, values) {
  const view = new DataView(new ArrayBuffer(values.length * 2));
  values.forEach((value, place) => {
    view.setUint16(place * 2, datatype === "BF16" ? floatBits(value) >>> 16 : halfBits(value), true);
  });
  return new Uint8Array(view.buffer);
}

const scratch = new DataView(new ArrayBuffer(4));

function floatBits(value) {
  scratch.setFloat32(0, value);
  return scratch.getUint32(0);
}

/** Return the bits of the nearest number of 16 bits (IEEE 754 binary16). */
export function halfBits(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | Math.round(size * 2 ** 24);
  let exponent = Math.floor(Math.log2(size));
  if (2 ** exponent > size) exponent -= 1;
  const fraction = Math.round((size / 2 ** exponent - 1) * 1024);
  return sign | (((exponent + 15) << 10) + fraction);
}
