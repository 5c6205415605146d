// A gRPC client made from our .proto files. Prints what it was answered as JSON: node grpc.js ADDRESS FOLDER_OF_THIS_REPOSITORY

import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const [address, ...includeDirs] = process.argv.slice(2);
const definition = loader.loadSync("protocols/grpc/grpc_service.proto", { includeDirs, keepCase: true, longs: String });
const { inference } = grpc.loadPackageDefinition(definition);
const client = new inference.GRPCInferenceService(address, grpc.credentials.createInsecure());
const found = {};

const call = (name, request) =>
  new Promise((resolve, reject) =>
    client[name](request, { deadline: Date.now() + 20000 }, (error, reply) => (error ? reject(error) : resolve(reply))),
  );
const floats = (values) => Buffer.from(new Float32Array(values).buffer);
const tensor = (name, datatype, shape) => ({ name, datatype, shape });

found.ready = (await call("ServerReady", {})).ready;
found.metadata = (await call("ModelMetadata", { name: "sum" })).inputs.map((input) => input.name);

const answer = await call("ModelInfer", {
  model_name: "sum",
  id: "7",
  inputs: [tensor("A", "FP32", [4]), tensor("B", "FP32", [4])],
  outputs: [{ name: "SUM" }],
  raw_input_contents: [floats([1, 2, 3, 4]), floats([1, 2, 3, 4])],
});
const bytes = Uint8Array.from(answer.raw_output_contents[0]);
found.id = answer.id;
found.sum = Array.from(new Float32Array(bytes.buffer));

try {
  await call("ModelInfer", { model_name: "nothing" });
} catch (error) {
  found.refused = [grpc.status[error.code], error.details];
}

const prompt = Buffer.from([4, 0, 0, 0, ...Buffer.from("node")]);
const count = Buffer.from(new Int32Array([3]).buffer);
found.tokens = await new Promise((resolve, reject) => {
  const stream = client.ModelStreamInfer();
  const tokens = [];
  stream.on("data", (reply) => tokens.push(reply.infer_response.raw_output_contents[0].subarray(4).toString()));
  stream.on("error", reject);
  stream.on("end", () => resolve(tokens));
  stream.write({
    model_name: "tokens",
    inputs: [tensor("PROMPT", "BYTES", [1]), tensor("COUNT", "INT32", [1])],
    outputs: [{ name: "TOKEN" }],
    raw_input_contents: [prompt, count],
  });
  stream.end();
});

client.close();
console.log(JSON.stringify(found));
