"""The builder of the fake TensorRT: placeholder module, filled in below."""
