# `make run` runs the main job, `make check` runs every check. Both set up .venv first.
.DEFAULT_GOAL := help
.PHONY: help run check protos
protos: ## Generate the Python code of protos/ anew
	.venv/bin/python -m grpc_tools.protoc -Iprotos --python_out=protos --pyi_out=protos --grpc_python_out=protos --plugin=protoc-gen-mypy_grpc=.venv/bin/protoc-gen-mypy_grpc --mypy_grpc_out=protos protos/shoal_protocol/v1/*.proto
