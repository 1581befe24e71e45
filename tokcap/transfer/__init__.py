"""Moving rollouts out of a store and into one, exactly: `export` and the two imports. Nothing is ever retired here.

```python
from tokcap.transfer import export, import_nemo_gym, import_traffic

done = export("/var/lib/tokcap", "train.parquet")          # the trained trajectories of every frozen rollout
done = export(store, "parts", format="npz", by="call")     # a directory of parts; repeated, it goes on
print(done.records, done.skipped, done.unreadable, done.changed)

import_nemo_gym("/data/ng_token_capture", "/var/lib/tokcap", freeze=True)
import_traffic(["traffic/linear-0.jsonl.gz"], "/var/lib/tokcap", finish=True)
```

# What is exported

Schema 1. A record is a trajectory, a call or a rollout. L: length of a trajectory, P: of a prompt, G: of an answer; all
log-probs are natural logs, NaN where unknown or not trained.

| by trajectory | | |
|---|---|---|
| `rollout_id`, `snapshot_id` | str | which rollout, which life of it |
| `version` | int64 | of the snapshot; 0: it was still open |
| `group` | str | what it is compared with |
| `index`, `count`, `trained`, `rollout_trained` | int64 | as `tokcap.trajectory.Trajectory` has them |
| `flags` | json | list of words, `tokcap.trajectory.FLAGS` |
| `token_ids` | int32 [L] | |
| `loss_mask` | bool [L] | True: sampled by the policy, and trained here |
| `log_probs` | float64 [L] | NaN where the mask is False |
| `policy_versions` | json | list of [version, start, end] |
| `meta` | json | what `finish` was told: reward ... |

| by call | | |
|---|---|---|
| `rollout_id`, `snapshot_id`, `version`, `group`, `meta` | | as above |
| `model_call_id`, `choice_index` | str, int64 | one record for each choice; no id: a loss that nobody could name |
| `recorded` | bool | False: no ids of it are stored, the arrays are empty |
| `outcome`, `verdict` | str | what became of it, and why its ids are trained or not (empty: it has none) |
| `prompt_token_ids` | int32 [P] | |
| `generation_token_ids`, `generation_log_probs` | int32 [G], float64 [G] | |
| `loss_mask` | bool [G] | which sampled ids are trained, in whichever trajectory |
| `model`, `response_id`, `finish_reason` | str | |
| `created_at` | float64 | Unix seconds |
| `output_items`, `token_item_index`, `policy_versions`, `sampling`, `extra` | json | as `TokenEntry` has them |
| `pieces` | json | list of base64 strings, one for each sampled id; null: not told |
| `routed_experts` | bytes | C order; `routed_experts_dtype` str (empty: none), `routed_experts_shape` json |
| `entry_schema_version` | int64 | 0 if not recorded |
| `boot_id`, `begun_at`, `ended_at` | str, float64, float64 | CLOCK_BOOTTIME seconds, NaN if unknown |
| `delivered`, `retry_count`, `idempotency_key`, `detail` | str, int64, str, str | |

| by rollout | | |
|---|---|---|
| `rollout_id`, `snapshot_id`, `version`, `group`, `meta` | | as above |
| `finished`, `incomplete`, `masked` | bool | |
| `reasons`, `metrics` | json | why something is not trained, and the account of its build |
| `token_ids`, `loss_mask`, `log_probs` | int32, bool, float64 | of all its trajectories, one behind the other |
| `trajectory_offsets` | int64 [n + 1] | where each of the n trajectories begins, and the end |
| `trajectories` | json | list of {index, trained, flags, policy_versions} |

| format | arrays | str | json | bytes |
|---|---|---|---|---|
| `jsonl`, `jsonl.gz` | lists; NaN null, infinities "inf" and "-inf" | string | as it is | base64 |
| `parquet` | list<int32>, list<bool>, list<float64>, list<int64> | string | string | binary |
| `npz`, `safetensors` | flat, with `<name>_offsets` int64 [records + 1] | uint8 (UTF-8), offsets | as str | as str |

In the flat formats record i of a column is `flat[offsets[i]:offsets[i + 1]]`; single numbers are arrays with one value
for each record (int64, float64, bool). The schema stands in each line of JSONL (`"schema": "tokcap/trajectory/1"`), in
the metadata of parquet and safetensors under `tokcap`, and in an npz as the array `tokcap` (uint8): JSON with `schema`,
`by`, `records` and `columns`. What JSON has no word for, within contents, is `{"__tokcap_unstorable__": "nan"}`. A lone
surrogate in a str becomes its escape, as UTF-8 can't hold it.
"""

from __future__ import annotations

from .exporting import Exported, export
from .importing import Imported, ImportedRollout
from .nemo_gym import import_nemo_gym
from .schema import FORMATS, LEVELS, SCHEMA_VERSION
from .traffic import import_traffic

__all__ = (
    "FORMATS",
    "LEVELS",
    "SCHEMA_VERSION",
    "Exported",
    "Imported",
    "ImportedRollout",
    "export",
    "import_nemo_gym",
    "import_traffic",
)
