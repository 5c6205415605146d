// An HTTP client with what Node has itself. Prints what it was answered as JSON: node http.js ADDRESS

const url = `http://${process.argv[2]}/v2`;
const found = {};

found.ready = (await fetch(`${url}/health/ready`)).status;
found.metadata = (await (await fetch(`${url}/models/sum`)).json()).inputs.map((input) => input.name);

const inputs = ["A", "B"].map((name) => ({ name, datatype: "FP32", shape: [4], data: [1, 2, 3, 4] }));
const answer = await fetch(`${url}/models/sum/infer`, { method: "POST", body: JSON.stringify({ id: "7", inputs }) });
const { id, outputs } = await answer.json();
found.id = id;
found.sum = outputs.find((output) => output.name === "SUM").data;

// Inputs in binary behind the JSON header, outputs in binary behind that of the answer.
const header = new TextEncoder().encode(
  JSON.stringify({
    inputs: ["A", "B"].map((name) => ({
      name, datatype: "FP32", shape: [4], parameters: { binary_data_size: 16 },
    })),
    outputs: [{ name: "SUM", parameters: { binary_data: true } }],
  }),
);
const rows = new Uint8Array(new Float32Array([1, 2, 3, 4, 4, 3, 2, 1]).buffer);
const binary = await fetch(`${url}/models/sum/infer`, {
  method: "POST",
  headers: { "Inference-Header-Content-Length": String(header.length), "Accept-Encoding": "gzip" },
  body: Buffer.concat([header, rows]),
});
const length = Number(binary.headers.get("Inference-Header-Content-Length"));
const bytes = new Uint8Array(await binary.arrayBuffer());
found.encoding = binary.headers.get("Content-Encoding");
found.binary = Array.from(new Float32Array(bytes.slice(length).buffer));

const refused = await fetch(`${url}/models/nothing/infer`, { method: "POST", body: "{}" });
found.refused = [refused.status, (await refused.json()).error];

const stream = await fetch(`${url}/models/tokens/generate_stream`, {
  method: "POST",
  body: JSON.stringify({ PROMPT: "node", COUNT: 3 }),
});
found.tokens = (await stream.text())
  .split("\n\n")
  .filter((event) => event)
  .map((event) => JSON.parse(event.slice("data: ".length)).TOKEN);

console.log(JSON.stringify(found));
