// A gRPC client of code that protoc makes from our .proto files. Prints what it was answered as JSON: main ADDRESS
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"naiad/inference"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func raw(values any) []byte {
	body := new(bytes.Buffer)
	check(binary.Write(body, binary.LittleEndian, values))
	return body.Bytes()
}

func input(name, datatype string, shape ...int64) *inference.ModelInferRequest_InferInputTensor {
	return &inference.ModelInferRequest_InferInputTensor{Name: name, Datatype: datatype, Shape: shape}
}

func output(name string) []*inference.ModelInferRequest_InferRequestedOutputTensor {
	return []*inference.ModelInferRequest_InferRequestedOutputTensor{{Name: name}}
}

// streamed reads all answers of a model that answers often.
func streamed(ctx context.Context, client inference.GRPCInferenceServiceClient) (tokens []string) {
	stream, err := client.ModelStreamInfer(ctx)
	check(err)
	check(stream.Send(&inference.ModelInferRequest{
		ModelName:        "tokens",
		Inputs:           []*inference.ModelInferRequest_InferInputTensor{input("PROMPT", "BYTES", 1), input("COUNT", "INT32", 1)},
		Outputs:          output("TOKEN"),
		RawInputContents: [][]byte{append(raw(int32(2)), "go"...), raw(int32(3))},
	}))
	check(stream.CloseSend())
	for {
		reply, err := stream.Recv()
		if err == io.EOF {
			return tokens
		}
		check(err)
		tokens = append(tokens, string(reply.InferResponse.RawOutputContents[0][4:]))
	}
}

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	connection, err := grpc.DialContext(ctx, os.Args[1], grpc.WithInsecure(), grpc.WithBlock())
	check(err)
	defer connection.Close()
	client := inference.NewGRPCInferenceServiceClient(connection)
	found := map[string]any{}

	ready, err := client.ServerReady(ctx, &inference.ServerReadyRequest{})
	check(err)
	found["ready"] = ready.Ready
	metadata, err := client.ModelMetadata(ctx, &inference.ModelMetadataRequest{Name: "sum"})
	check(err)
	names := []string{}
	for _, input := range metadata.Inputs {
		names = append(names, input.Name)
	}
	found["metadata"] = names

	four := raw([]float32{1, 2, 3, 4})
	answer, err := client.ModelInfer(ctx, &inference.ModelInferRequest{
		ModelName:        "sum",
		Id:               "7",
		Inputs:           []*inference.ModelInferRequest_InferInputTensor{input("A", "FP32", 4), input("B", "FP32", 4)},
		Outputs:          output("SUM"),
		RawInputContents: [][]byte{four, four},
	})
	check(err)
	sum := make([]float32, 4)
	check(binary.Read(bytes.NewReader(answer.RawOutputContents[0]), binary.LittleEndian, sum))
	found["id"], found["sum"] = answer.Id, sum

	_, err = client.ModelInfer(ctx, &inference.ModelInferRequest{ModelName: "nothing"})
	found["refused"] = []string{status.Code(err).String(), status.Convert(err).Message()}
	found["tokens"] = streamed(ctx, client)

	text, err := json.Marshal(found)
	check(err)
	fmt.Println(string(text))
}
