"""Generated from the .proto files beside it (`make protos`). Nothing here is written by hand."""
