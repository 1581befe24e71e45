"""Ids and log-probs out of the answers of model servers, whatever engine and dialect.

`parse_answer` reads a whole answer, `StreamJoiner` makes one of a stream, and `SHAPES` lists what is known:

| shape | prompt ids | sampled ids | log-probs |
|---|---|---|---|
| `nemo-chat` | `choices[].message.prompt_token_ids` | `.generation_token_ids` | `.generation_log_probs` |
| `dynamo` | `nvext.engine_data.prompt_token_ids` | `.completion_token_ids` | `.completion_logprobs` |
| `sglang-chat` | `choices[].prompt_token_ids`, `sglext.input_ids` | `choices[].response_token_ids`, \
`.meta_info.output_token_logprobs`, `sglext.output_ids` | `choices[].meta_info`, `.logprobs.content` |
| `sglang-completions` | `choices[].prompt_token_ids` | `choices[].token_ids` | `choices[].logprobs.token_logprobs` |
| `sglang-generate` | `prompt_token_ids` | `output_ids`, `meta_info.output_token_logprobs` | the same triples |
| `trtllm-completions` | `prompt_token_ids` | `choices[].token_ids` | `choices[].logprobs.token_logprobs` |
| `vllm-chat` | `prompt_token_ids` | `choices[].token_ids` | `choices[].logprobs.content` |
| `vllm-completions` | `choices[].prompt_token_ids` | `choices[].token_ids` | `choices[].logprobs.token_logprobs` |
| `vllm-generate` | `prompt_token_ids` | `choices[].token_ids` | `choices[].logprobs.content` |
| `vllm-chat-token-names` | none of its own | `choices[].logprobs.content[].token` | `choices[].logprobs.content` |
| `nemo-responses` | `output[].prompt_token_ids` | `.generation_token_ids` | `.generation_log_probs` |
| `vllm-responses` | `input_messages[0].tokens` | `output_messages[0].tokens` | `output[].content[].logprobs` |
| `tgi-generate` | `details.prefill` | `details.tokens` | `details.tokens` |
| `tinker-sample` | none: refused | `sequences[].tokens` | `sequences[].logprobs` |

| shape | engine | seen since | route |
|---|---|---|---|
| `nemo-chat` | NeMo Gym, NeMo RL | 0.7 | `/v1/chat/completions` |
| `dynamo` | Dynamo | extra_fields: engine_data | `/v1/chat/completions, /v1/completions` |
| `sglang-chat` | SGLang | 0.5.15 (meta_info), 0.5.18 (response_token_ids), 0.5.20 (sglext) | `/v1/chat/completions` |
| `sglang-completions` | SGLang | 0.5.18 (return_token_ids) | `/v1/completions` |
| `sglang-generate` | SGLang | 0.4.10 | `/generate` |
| `trtllm-completions` | TensorRT-LLM | trtllm-serve | `/v1/completions` |
| `vllm-chat` | vLLM | 0.10.2 (return_token_ids) | `/v1/chat/completions` |
| `vllm-completions` | vLLM | 0.10.2 (return_token_ids) | `/v1/completions` |
| `vllm-generate` | vLLM | 0.11; integer ids beside the log-probs from 0.32 | `/inference/v1/generate` |
| `vllm-chat-token-names` | vLLM and gateways | before 0.10.2 (return_tokens_as_token_ids) | `/v1/chat/completions` |
| `nemo-responses` | NeMo Gym, NeMo RL | 0.7 | `/v1/responses` |
| `vllm-responses` | vLLM | 0.13 (enable_response_messages) | `/v1/responses` |
| `tgi-generate` | Text Generation Inference | details, decoder_input_details | `/generate` |
| `tinker-sample` | Tinker | SampleResponse | `sample` |

The shape names who spoke; the places of all shapes of a dialect are read in any case, and all that hold ids must
agree. Ids are taken from where an engine writes them and never made from text or bytes. Either a record is exact and
whole, or `UnusableAnswerError` says why it isn't:

- two places disagree; ids of some choices only, or of fewer choices than were asked for; sampled ids without prompt
  ids, or the other way round;
- another number of ids than the engine counts (`usage`, `meta_info`, `details`), which is how ids swallowed by a tool
  parser show; a count that is absent abstains;
- more log-probs than ids. With fewer, all of them (in a stream those of the chunk) are unknown, because nothing tells
  which are missing. A log-prob that is null or NaN stays unknown; none is padded with a number, dropped, or looked up
  by text; -9999.0 is kept and listed as clamped. `echo: true` makes the columns of completions cover the
  prompt as well, and only then may they be longer;
- an id that is no integer from 0 to 2^31 - 1.

What is beside the ids (spans of weights, routed experts, pieces) never costs a record: what can't be true is left out
and noted in `extra`.
"""

from __future__ import annotations

from .answer import ParsedAnswer, ParsedChoice, Shape
from .events import EventSplitter, decode_json
from .joiner import StreamJoiner
from .lifting import decode_answer, lift
from .recent import PROMPT_MEMORY_BYTES, PromptReader, RecentPrompts
from .table import SHAPES, parse_answer

__all__ = (
    "PROMPT_MEMORY_BYTES",
    "SHAPES",
    "EventSplitter",
    "ParsedAnswer",
    "ParsedChoice",
    "PromptReader",
    "RecentPrompts",
    "Shape",
    "StreamJoiner",
    "decode_answer",
    "decode_json",
    "lift",
    "parse_answer",
)
