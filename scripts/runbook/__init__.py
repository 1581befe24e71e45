"""The run-book: the serving path in front of a real vLLM, started by `scripts/vllm-runbook`."""
