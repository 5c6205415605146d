// An HTTP client with Go's standard library alone. Prints what it was answered as JSON: main ADDRESS
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
)

type tensor struct {
	Name       string         `json:"name"`
	Datatype   string         `json:"datatype,omitempty"`
	Shape      []int          `json:"shape,omitempty"`
	Data       []float32      `json:"data,omitempty"`
	Parameters map[string]any `json:"parameters,omitempty"`
}

type request struct {
	ID      string   `json:"id,omitempty"`
	Inputs  []tensor `json:"inputs"`
	Outputs []tensor `json:"outputs,omitempty"`
}

type answer struct {
	ID      string   `json:"id"`
	Error   string   `json:"error"`
	Inputs  []tensor `json:"inputs"`
	Outputs []tensor `json:"outputs"`
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}

// call sends a request and returns status, header and body.
func call(method, url string, header map[string]string, body []byte) (int, http.Header, []byte) {
	made, err := http.NewRequest(method, url, bytes.NewReader(body))
	check(err)
	for name, value := range header {
		made.Header.Set(name, value)
	}
	reply, err := http.DefaultClient.Do(made)
	check(err)
	defer reply.Body.Close()
	content, err := io.ReadAll(reply.Body)
	check(err)
	return reply.StatusCode, reply.Header, content
}

func decoded(content []byte) (found answer) {
	check(json.Unmarshal(content, &found))
	return found
}

func encoded(value any) []byte {
	text, err := json.Marshal(value)
	check(err)
	return text
}

// inBinary sends and receives tensors behind the JSON.
func inBinary(url string) []float32 {
	size := map[string]any{"binary_data_size": 16}
	header := encoded(request{
		Inputs:  []tensor{{Name: "A", Datatype: "FP32", Shape: []int{4}, Parameters: size}, {Name: "B", Datatype: "FP32", Shape: []int{4}, Parameters: size}},
		Outputs: []tensor{{Name: "SUM", Parameters: map[string]any{"binary_data": true}}},
	})
	body := bytes.NewBuffer(header)
	check(binary.Write(body, binary.LittleEndian, []float32{1, 2, 3, 4, 4, 3, 2, 1}))
	lengths := map[string]string{"Inference-Header-Content-Length": strconv.Itoa(len(header))}
	_, told, content := call("POST", url+"/models/sum/infer", lengths, body.Bytes())
	length, err := strconv.Atoi(told.Get("Inference-Header-Content-Length"))
	check(err)
	values := make([]float32, 4)
	check(binary.Read(bytes.NewReader(content[length:]), binary.LittleEndian, values))
	return values
}

// streamed reads server-sent events.
func streamed(url string) (tokens []string) {
	_, _, content := call("POST", url+"/models/tokens/generate_stream", nil, encoded(map[string]any{"PROMPT": "go", "COUNT": 3}))
	for _, event := range strings.Split(strings.TrimSpace(string(content)), "\n\n") {
		var told struct{ TOKEN string }
		check(json.Unmarshal([]byte(strings.TrimPrefix(event, "data: ")), &told))
		tokens = append(tokens, told.TOKEN)
	}
	return tokens
}

func main() {
	url := "http://" + os.Args[1] + "/v2"
	found := map[string]any{}
	found["ready"], _, _ = call("GET", url+"/health/ready", nil, nil)
	_, _, content := call("GET", url+"/models/sum", nil, nil)
	names := []string{}
	for _, input := range decoded(content).Inputs {
		names = append(names, input.Name)
	}
	found["metadata"] = names
	four := []float32{1, 2, 3, 4}
	_, _, content = call("POST", url+"/models/sum/infer", nil, encoded(request{
		ID:      "7",
		Inputs:  []tensor{{Name: "A", Datatype: "FP32", Shape: []int{4}, Data: four}, {Name: "B", Datatype: "FP32", Shape: []int{4}, Data: four}},
		Outputs: []tensor{{Name: "SUM"}},
	}))
	found["id"], found["sum"] = decoded(content).ID, decoded(content).Outputs[0].Data
	found["binary"] = inBinary(url)
	status, _, content := call("POST", url+"/models/nothing/infer", nil, []byte("{}"))
	found["refused"] = []any{status, decoded(content).Error}
	found["tokens"] = streamed(url)
	fmt.Println(string(encoded(found)))
}
