// Tests the messages that people read: whole messages for whole files. A change of wording must be made here, too.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/base/status.h"
#include "runtime/config/strategy_file.h"

namespace tessera {
namespace {

struct BadFile {
  const char* name;
  const char* text;
  const char* errors;
};

std::ostream& operator<<(std::ostream& out, const BadFile& file) { return out << file.name; }

class StrategyErrors : public ::testing::TestWithParam<BadFile> {};

TEST_P(StrategyErrors, WrongFileGivesItsListedErrors) {
  const auto strategy = parse_strategy(GetParam().text, "s.json");
  ASSERT_FALSE(strategy.ok());
  EXPECT_EQ(exit_code_of(strategy.status()), ExitCode::kConfig);
  const std::string errors = GetParam().errors;
  // If no error has a hint of its own, the message ends with one general hint.
  const bool has_hint = errors.find("hint: ") != std::string::npos;
  EXPECT_EQ(message_of(strategy.status()),
            has_hint ? errors : errors + "\n[T0512] hint: docs/strategy.md lists every key and what it may be");
}

const BadFile kSyntax[] = {
    {"Empty", "", R"(s.json:1:1: /: not JSON. [T0504] hint: the file is empty: the smallest is {})"},
    {"Blank", " \n\n ", R"(s.json:3:2: /: not JSON. [T0504] hint: the file is empty: the smallest is {})"},
    {"Unclosed", "{\"optimizer\": {\"lr\": 1",
     R"(s.json:1:23: /optimizer: not JSON. [T0505] hint: the file ends too early: a bracket or brace is not closed)"},
    {"UnclosedString", "{\"strategy\": \"FULL",
     R"(s.json:1:14: /: not JSON: in value: invalid string: missing closing quote. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"NewlineInString", "{\"strategy\": \"FULL\n\"}",
     R"(s.json:1:14: /: not JSON: in value: invalid string: control character U+000A (LF) must be escaped to \u000A or \n. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"Comment", "{\n  // fast\n  \"prefetch\": 2}",
     R"(s.json:2:3: /: not JSON. [T0499] hint: comments are not allowed)"},
    {"TrailingComma", "{\"prefetch\": 2,\n}",
     R"(s.json:2:1: /: not JSON. [T0506] hint: no comma may stand before a closing bracket)"},
    {"MissingComma", "{\"prefetch\": 2 \"memory\": {}}",
     R"(s.json:1:16: /: not JSON. [T0508] hint: a comma is missing before this)"},
    {"MissingColon", "{\"prefetch\" 2}",
     R"(s.json:1:13: /: not JSON: in object separator: unexpected number literal; expected ':'. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"SingleQuotes", "{'prefetch': 2}", R"(s.json:1:2: /: not JSON. [T0500] hint: strings stand in double quotes)"},
    {"BareKey", "{prefetch: 2}", R"(s.json:1:2: /: not JSON. [T0509] hint: keys stand in double quotes)"},
    {"NaN", "{\"optimizer\": {\"lr\": NaN}}",
     R"(s.json:1:22: /optimizer: not JSON. [T0501] hint: NaN and infinities are not allowed)"},
    {"Infinity", "{\"optimizer\": {\"lr\": -Infinity}}",
     R"(s.json:1:22: /optimizer: not JSON. [T0501] hint: NaN and infinities are not allowed)"},
    {"TooLargeForADouble", "{\"optimizer\": {\"lr\": 1e999}}",
     R"(s.json:1:22: /optimizer: not JSON: in value: the number is too large for a double. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"PythonTrue", "{\"optimizer\": {\"nesterov\": True}}",
     R"(s.json:1:28: /optimizer: not JSON. [T0502] hint: write true and false in lower case)"},
    {"LeadingZero", "{\"prefetch\": 01}", R"(s.json:1:15: /: not JSON. [T0507] hint: a number has no leading zeros)"},
    {"BareFraction", "{\"optimizer\": {\"lr\": .1}}",
     R"(s.json:1:22: /optimizer: not JSON. [T0503] hint: a number begins with a digit or a minus sign)"},
    {"TrailingGarbage", "{}\n{}",
     R"(s.json:2:1: /: not JSON: in value: unexpected '{'; expected end of input. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"StrayBracket", "{\"units\": {\"classes\": [\"A\"}}}",
     R"(s.json:1:27: /units/classes: not JSON: in array: unexpected '}'; expected ']'. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"InvalidUtf8", "{\"units\": {\"classes\": [\"caf\xE9\"]}}",
     R"(s.json:1:29: /units/classes: not JSON: in value: invalid string: ill-formed UTF-8 byte. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"InvalidUtf8InKey", "{\"a\xFF\": 1}",
     R"(s.json:1:4: /: not JSON: in object key: invalid string: ill-formed UTF-8 byte; expected string literal. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"BadEscape", "{\"strategy\": \"\\q\"}",
     R"(s.json:1:14: /: not JSON: in value: invalid string: forbidden character after backslash. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"LoneSurrogate", "{\"strategy\": \"\\ud800\"}",
     R"(s.json:1:14: /: not JSON: in value: invalid string: surrogate U+D800..U+DBFF must be followed by U+DC00..U+DFFF. [T0510] hint: repair this place; json.org shows the grammar)"},
    {"NotAnObject", "[1, 2]",
     R"(s.json:1:1: /: must be an object (keys: strategy, mesh, placement, units, prefetch, prefetch_bytes, reductions_ahead, host_sharing, secondary, mixed_precision, gradient_accumulation, gradient_sync, reproducible, record_hashes, deal, gradient_clipping, gradient_clip_value, broadcast_buffers, optimizer, ema, lr_schedule, offload, compression, checkpoint, on_spike, noise_scale, durable, sync, memory, check, comm), got a list of 2)"},
    {"DuplicateKeys", "{\"prefetch\": 1,\n \"optimizer\": {\"lr\": 1, \"lr\": 2},\n \"prefetch\": 1}",
     R"(s.json:2:25: /optimizer/lr: given twice. [T0496] hint: remove one; the first is at 2:16)"
     "\n"
     R"(s.json:3:2: /prefetch: given twice. [T0496] hint: remove one; the first is at 1:2)"},
    {"DuplicateBeforeSyntaxError", "{\"prefetch\": 1, \"prefetch\": 2, oops}",
     R"(s.json:1:17: /prefetch: given twice. [T0496] hint: remove one; the first is at 1:2)"
     "\n"
     R"(s.json:1:32: /: not JSON. [T0509] hint: keys stand in double quotes)"},
};
INSTANTIATE_TEST_SUITE_P(Syntax, StrategyErrors, ::testing::ValuesIn(kSyntax),
                         [](const auto& info) { return std::string(info.param.name); });

const BadFile kValues[] = {
    {"UnknownKey", R"({"optimiser": {"lr": 1}})",
     R"(s.json:1:2: /optimiser: unknown key. [T0426] hint: did you mean "optimizer"?)"},
    {"UnknownKeyOfAnotherGroup", R"({"lr": 1, "param": "bf16", "type": "sgd"})",
     R"(s.json:1:2: /lr: unknown key. [T0516] hint: did you mean optimizer.lr or sync.outer.lr?)"
     "\n"
     R"(s.json:1:11: /param: unknown key. [T0516] hint: did you mean mixed_precision.param?)"
     "\n"
     R"(s.json:1:28: /type: unknown key. [T0516] hint: did you mean optimizer.type or lr_schedule.type or sync.type?)"},
    {"UnknownKeyThatBelongsToTheTop", R"({"offload": {"durable": {"dir": "d"}}, "memory": {"prefetch": 1}})",
     R"(s.json:1:14: /offload/durable: unknown key. [T0516] hint: did you mean "durable" at the top level of the file?)"
     "\n"
     R"(s.json:1:51: /memory/prefetch: unknown key. [T0516] hint: did you mean "prefetch" at the top level of the file?)"},
    {"UnknownKeyWithoutGuess", R"({"memory": {"zzz": 1}})",
     R"(s.json:1:13: /memory/zzz: unknown key. [T0517] hint: known here: limit, tensor_heap)"},
    {"KeysAreEscaped", "{\"a/b~c\\n\": 1}",
     R"(s.json:1:2: /a~1b~0c\n: unknown key. [T0517] hint: known here: strategy, mesh, placement, units, prefetch, prefetch_bytes, reductions_ahead, host_sharing, secondary, mixed_precision, gradient_accumulation, gradient_sync, reproducible, record_hashes, deal, gradient_clipping, gradient_clip_value, broadcast_buffers, optimizer, ema, lr_schedule, offload, compression, checkpoint, on_spike, noise_scale, durable, sync, memory, check, comm)"},
    {"ReproducibleBesideRoundedSums", R"({"reproducible": true, "mixed_precision": {"reduce": "bf16"}})",
     R"(s.json:1:18: /reproducible: cannot stand beside mixed_precision.reduce bf16 or fp16: what is rounded before it is sent is a rank's sum, and one rank sends nothing. [T0815] hint: leave one of them out; parameters may be bf16 or fp16)"},
    {"ReproducibleBesideUpdatesInBackward", R"({"reproducible": true, "optimizer": {"in_backward": true}})",
     R"(s.json:1:18: /reproducible: cannot stand beside optimizer.in_backward: it has one microbatch a step on each rank, so another number of ranks has another number of microbatches. [T0815] hint: leave one of them out)"},
    {"ReproducibleBesideIgnoredParameters", R"({"reproducible": true, "units": {"ignored": ["a"]}})",
     R"(s.json:1:18: /reproducible: cannot stand beside units.ignored: the program sums the gradients of these parameters, in an order that the Engine does not know. [T0815] hint: leave one of them out)"},
    {"ReproducibleBesideOuterSteps", R"({"sync": {"type": "local_sgd", "every": 7}, "reproducible": true})",
     R"(s.json:1:61: /reproducible: cannot stand beside a sync.type other than each_step: another number of replicas trains another model. [T0815] hint: leave one of them out)"},
    {"NoiseScaleBesideCompression", R"({"noise_scale": {"every": 50}, "compression": {"gradients": "int8"}})",
     R"(s.json:1:27: /noise_scale/every: cannot stand beside compression.gradients or sums of int8 or int4: rounding adds noise of its own to the mean of all ranks, which would count as the data's. [T0834] hint: leave one of them out; "lossless" goes with it)"},
    {"NoiseScaleBesideAMethod",
     R"({"strategy": "NO_SHARD", "noise_scale": {"every": 50}, "compression": {"method": {"type": "top_k"}}})",
     R"(s.json:1:51: /noise_scale/every: cannot stand beside a compression.method: what ranks sum is not their gradients, so its norm does not belong to theirs. [T0834] hint: leave one of them out)"},
    {"NoiseScaleOfAsynchronousRanks",
     R"({"strategy": "SHARD_OPTIMIZER", "noise_scale": {"every": 50}, "sync": {"type": "asynchronous"}})",
     R"(s.json:1:58: /noise_scale/every: cannot stand beside sync.type asynchronous, backups or hogwild: no rank knows the mean of all gradients. [T0834] hint: leave one of them out)"},
    {"NoiseScaleBesideReproducible", R"({"noise_scale": {"every": 50}, "reproducible": true})",
     R"(s.json:1:27: /noise_scale/every: cannot stand beside reproducible: squares are added up rank by rank, so another number of ranks would have other bits in its results. [T0834] hint: leave one of them out)"},
    {"NoiseScaleSmoothedWithoutMeasurements", R"({"noise_scale": {"smoothing": 0.5}})",
     R"(s.json:1:31: /noise_scale/smoothing: 0.5 has no effect: it needs noise_scale.every above 0. [T0518] hint: leave it out, or change that)"},
    {"RecordedHashesWithoutReproducible", R"({"record_hashes": {"every": 10}})",
     R"(s.json:1:29: /record_hashes/every: 10 has no effect: it needs reproducible true. [T0518] hint: leave it out, or change that)"},
    {"RecordedHashesWithoutAFile", R"({"reproducible": true, "record_hashes": {"every": 10, "file": ""}})",
     R"(s.json:1:63: /record_hashes/file: is empty, and record_hashes.every asks for a file. [T0892] hint: leave it out for "hashes.jsonl")"},
    {"UnknownChoice", R"({"strategy": "FULL_SHRAD", "comm": {"transport": "ucx"}})",
     R"(s.json:1:14: /strategy: must be one of NO_SHARD, SHARD_OPTIMIZER, SHARD_GRADIENTS, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD, got the string "FULL_SHRAD". [T0426] hint: did you mean "FULL_SHARD"?)"
     "\n"
     R"(s.json:1:50: /comm/transport: must be one of auto, host, gloo, nccl, cuda_host, mpi, got the string "ucx")"},
    {"ChoiceInLowerCase", R"({"strategy": "full_shard"})",
     R"(s.json:1:14: /strategy: must be one of NO_SHARD, SHARD_OPTIMIZER, SHARD_GRADIENTS, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD, got the string "full_shard". [T0426] hint: did you mean "FULL_SHARD"?)"},
    {"WrongTypes", R"({"prefetch": "two", "strategy": 3, "optimizer": [], "memory": null,
 "units": {"classes": "Block"}, "mesh": {"shard": {}}, "comm": {"timeout_s": true}})",
     R"(s.json:1:14: /prefetch: must be an integer from 0 to 1024, got the string "two")"
     "\n"
     R"(s.json:1:33: /strategy: must be one of NO_SHARD, SHARD_OPTIMIZER, SHARD_GRADIENTS, SHARD_GRAD_OP, FULL_SHARD, HYBRID_SHARD, got 3)"
     "\n"
     R"(s.json:1:49: /optimizer: must be an object (keys: type, lr, betas, eps, weight_decay, momentum, dampening, nesterov, trust_coefficient, alpha, centered, lr_decay, freeze_step, muon, adafactor, state_dtype, groups, shard_over, in_backward), got a list of 0)"
     "\n"
     R"(s.json:1:63: /memory: must be an object (keys: limit, tensor_heap), got null)"
     "\n"
     R"(s.json:2:23: /units/classes: must be a list of different non-empty strings, got the string "Block")"
     "\n"
     R"(s.json:2:51: /mesh/shard: must be an integer from 0 to 1000000, got an object)"
     "\n"
     R"(s.json:2:78: /comm/timeout_s: must be a number above 0, at most 604800, got true)"},
    {"OutOfRange", R"({"prefetch": -1, "gradient_accumulation": 0, "gradient_clipping": -0.5,
 "optimizer": {"lr": 1e9, "eps": 0, "weight_decay": -1}, "comm": {"timeout_s": 0}})",
     R"(s.json:1:14: /prefetch: must be an integer from 0 to 1024, got -1)"
     "\n"
     R"(s.json:1:43: /gradient_accumulation: must be an integer from 1 to 1000000, got 0)"
     "\n"
     R"(s.json:1:67: /gradient_clipping: must be a number from 0 to 1e30, got -0.5)"
     "\n"
     R"(s.json:2:22: /optimizer/lr: must be a number from 0 to 1000, got 1000000000.0)"
     "\n"
     R"(s.json:2:34: /optimizer/eps: must be a number from 1e-30 to 1, got 0)"
     "\n"
     R"(s.json:2:53: /optimizer/weight_decay: must be a number from 0 to 1000, got -1)"
     "\n"
     R"(s.json:2:80: /comm/timeout_s: must be a number above 0, at most 604800, got 0)"},
    {"FractionForInteger", R"({"prefetch": 1.5, "gradient_accumulation": 1e300})",
     R"(s.json:1:14: /prefetch: must be an integer from 0 to 1024, got 1.5)"
     "\n"
     R"(s.json:1:44: /gradient_accumulation: must be an integer from 1 to 1000000, got 1e+300)"},
    {"Pairs", R"({"optimizer": {"betas": [0.9, 1.0]}, "optimizer_": 0})",
     R"(s.json:1:31: /optimizer/betas/1: must be a number from 0 to below 1, got 1.0)"
     "\n"
     R"(s.json:1:38: /optimizer_: unknown key. [T0426] hint: did you mean "optimizer"?)"},
    {"PairOfThree", R"({"optimizer": {"betas": [0.9, 0.99, 0.999]}})",
     R"(s.json:1:25: /optimizer/betas: must be a list of two numbers, each from 0 to below 1, got a list of 3)"},
    {"Names", R"({"units": {"classes": ["A", "", "B", "A", 3]}})",
     R"(s.json:1:29: /units/classes/1: must be a non-empty string, got the string "")"
     "\n"
     R"(s.json:1:38: /units/classes/3: the string "A" stands in the list already. [T0514] hint: remove one)"
     "\n"
     R"(s.json:1:43: /units/classes/4: must be a non-empty string, got 3)"},
    {"Bytes", R"({"memory": {"limit": "8gb"}})",
     R"(s.json:1:22: /memory/limit: "8gb" is not a number of bytes: unknown unit "gb". [T0426] hint: did you mean "GB"?)"},
    {"BytesTooMany", R"({"memory": {"limit": 18446744073709551615}})",
     R"(s.json:1:22: /memory/limit: must be a number of bytes (at most 4096.00 PiB), or a string such as "8GiB" or "500MB", got 18446744073709551615)"},
    {"BytesNegative", R"({"memory": {"limit": "-1GiB"}})",
     R"(s.json:1:22: /memory/limit: "-1GiB" is not a number of bytes. [T0392] hint: it begins with a digit, such as "8GiB" or "500MB")"},
    {"Schema", R"({"$schema": 7, "memory": {"$schema": ""}})",
     R"(s.json:1:13: /$schema: must be a string, the place of the schema; got 7)"
     "\n"
     R"(s.json:1:27: /memory/$schema: unknown key. [T0517] hint: known here: limit, tensor_heap)"},
    {"ColumnsCountCharacters", "{\"units\": {\"classes\": [\"\xC3\xA9t\xC3\xA9\", 1]}}",
     R"(s.json:1:31: /units/classes/1: must be a non-empty string, got 1)"},
    {"OneSlipIsOneMessage", R"({"lr_schedule": {"type": "cosine", "total_steps": "many", "warmup_steps": 5}})",
     R"(s.json:1:51: /lr_schedule/total_steps: must be an integer from 0 to 1e12, got the string "many")"},
};
INSTANTIATE_TEST_SUITE_P(Values, StrategyErrors, ::testing::ValuesIn(kValues),
                         [](const auto& info) { return std::string(info.param.name); });

const BadFile kCombinations[] = {
    {"ReplicasOfFullShard", R"({"mesh": {"replicate": 2}})",
     R"(s.json:1:24: /mesh/replicate: 2 replicas of FULL_SHARD are HYBRID_SHARD. [T0519] hint: write "strategy": "HYBRID_SHARD", or leave "mesh" out)"},
    {"InBackwardBesideClipping", R"({"optimizer": {"in_backward": true}, "gradient_clipping": 1})",
     R"(s.json:1:31: /optimizer/in_backward: cannot stand beside gradient_clipping: the norm of all gradients is known only when backward has ended. [T0561] hint: leave one of them out)"},
    {"InBackwardBesideSpikes", R"({"on_spike": {"action": "skip"}, "optimizer": {"in_backward": true}})",
     R"(s.json:1:63: /optimizer/in_backward: cannot stand beside on_spike: the loss of all ranks is known only when backward has ended. [T0561] hint: leave one of them out)"},
    {"RollbackWithoutAFolder", R"({"on_spike": {"action": "rollback"}})",
     R"(s.json:1:25: /on_spike/action: rollback needs a folder to go back to. [T0558] hint: "checkpoint": {"dir": ...}, the folder with the checkpoints to go back to, in this file: a flag does not count; or take "skip")"},
    {"RollbackBesideCommits",
     R"({"on_spike": {"action": "rollback"}, "checkpoint": {"dir": "a"}, "durable": {"every": 1, "dir": "b"}})",
     R"(s.json:1:25: /on_spike/action: rollback cannot stand beside "durable": a run that goes on from a commit knows no checkpoint to go back to. [T0559] hint: take "skip")"},
    {"CommitsWithoutAFolder", R"({"durable": {"every": 1}})",
     R"(s.json:1:23: /durable/every: needs a folder. [T0560] hint: "durable": {"dir": ...}, on a local disk of each host)"},
    {"AFolderWithoutCommits", R"({"durable": {"dir": "a"}})",
     R"(s.json:1:21: /durable/dir: "a" has no effect: it needs durable.every above 0. [T0518] hint: leave it out, or change that)"},
    {"AHookOfShards", R"({"compression": {"method": {"type": "hook"}}})",
     R"(s.json:1:28: /compression/method: {"type":"hook"} has no effect: it needs strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS. [T0518] hint: leave it out, or change that)"},
    {"SpikesThatNothingTells", R"({"on_spike": {"factor": 3}})",
     R"(s.json:1:25: /on_spike/factor: 3.0 has no effect: it needs on_spike.action skip or rollback. [T0518] hint: leave it out, or change that)"},
    {"InBackwardBesideAccumulation", R"({"gradient_accumulation": 2, "optimizer": {"in_backward": true}})",
     R"(s.json:1:59: /optimizer/in_backward: cannot stand beside gradient_accumulation above 1: each backward would be a step of its own. [T0561] hint: leave one of them out)"},
    {"InBackwardBesideLossScaling", R"({"optimizer": {"in_backward": true}, "mixed_precision": {"param": "fp16"}})",
     R"(s.json:1:31: /optimizer/in_backward: cannot stand beside param fp16: loss scaling skips steps that overflow, and an update in backward cannot be taken back. [T0561] hint: leave one of them out)"},
    {"InBackwardBesideGradientsBelow",
     R"({"optimizer": {"in_backward": true}, "offload": {"gradients": {"tier": "nvme"}, "paths": ["/tmp"]}})",
     R"(s.json:1:31: /optimizer/in_backward: cannot stand beside offload.gradients below memory: gradients that are used when they are summed need no place. [T0561] hint: leave one of them out)"},
    {"InBackwardBesideRestoredFeedback",
     R"({"compression": {"gradients": "int8", "error_feedback": true, "restore_skipped": true}, "optimizer": {"in_backward": true}})",
     R"(s.json:1:118: /optimizer/in_backward: cannot stand beside compression.restore_skipped: a step whose updates are under way is not skipped. [T0561] hint: leave one of them out)"},
    {"WorldWithoutHybrid", R"({"optimizer": {"shard_over": "world"}})",
     R"(s.json:1:30: /optimizer/shard_over: "world" has no effect: it needs strategy HYBRID_SHARD. [T0518] hint: leave it out, or change that)"},
    {"TwoWaysToCutUnits", R"({"units": {"classes": ["A"], "min_numel": 1000}})",
     R"(s.json:1:43: /units/min_numel: cannot stand beside classes or modules: it finds the units itself. [T0520] hint: give one or the other)"},
    {"BucketsOfShards", R"({"units": {"bucket_cap_mb": 25}})",
     R"(s.json:1:29: /units/bucket_cap_mb: buckets need "strategy": "NO_SHARD", got FULL_SHARD. [T0521] hint: leave bucket_cap_mb out, and name units in classes)"},
    {"BucketsOfOptimizerShards", R"({"strategy": "SHARD_OPTIMIZER", "units": {"bucket_cap_mb": 0}})",
     R"(s.json:1:60: /units/bucket_cap_mb: buckets need "strategy": "NO_SHARD", got SHARD_OPTIMIZER. [T0521] hint: leave bucket_cap_mb out, and name units in classes)"},
    {"BucketsBesideClasses", R"({"strategy": "NO_SHARD", "units": {"classes": ["A"], "bucket_cap_mb": 25}})",
     R"(s.json:1:71: /units/bucket_cap_mb: cannot stand beside classes, modules or min_numel: buckets are the units. [T0522] hint: give one or the other)"},
    {"BucketsBesideSizes", R"({"strategy": "NO_SHARD", "units": {"min_numel": 9, "bucket_cap_mb": 0}})",
     R"(s.json:1:69: /units/bucket_cap_mb: cannot stand beside classes, modules or min_numel: buckets are the units. [T0522] hint: give one or the other)"},
    {"BucketsOfNonsense", R"({"strategy": "NO_SHARD", "units": {"bucket_cap_mb": "25MB", "first_bucket_mb": null}})",
     R"(s.json:1:53: /units/bucket_cap_mb: must be null or a number from 0 to 1000000, got the string "25MB")"
     "\n"
     R"(s.json:1:80: /units/first_bucket_mb: must be a number above 0, at most 1000000, got null)"},
    {"FirstBucketOfNone", R"({"strategy": "NO_SHARD", "units": {"first_bucket_mb": 2}})",
     R"(s.json:1:55: /units/first_bucket_mb: 2.0 has no effect: it needs units.bucket_cap_mb above 0. [T0518] hint: leave it out, or change that)"},
    {"FirstBucketOfSingleParameters",
     R"({"strategy": "NO_SHARD", "units": {"bucket_cap_mb": 0, "first_bucket_mb": 2}})",
     R"(s.json:1:75: /units/first_bucket_mb: 2.0 has no effect: it needs units.bucket_cap_mb above 0. [T0518] hint: leave it out, or change that)"},
    {"MomentumWithAdam", R"({"optimizer": {"momentum": 0.9, "nesterov": true}})",
     R"(s.json:1:28: /optimizer/momentum: 0.9 has no effect: it needs optimizer.type sgd, rmsprop or lars. [T0518] hint: leave it out, or change that)"
     "\n"
     R"(s.json:1:45: /optimizer/nesterov: true has no effect: it needs optimizer.type sgd or lars. [T0518] hint: leave it out, or change that)"},
    {"BetasWithSgd", R"({"optimizer": {"type": "sgd", "betas": [0.9, 0.95], "eps": 1e-6}})",
     R"(s.json:1:40: /optimizer/betas: [0.9,0.95] has no effect: it needs optimizer.type adamw, adam, lion, muon, lamb or own_matrix. [T0518] hint: leave it out, or change that)"
     "\n"
     R"(s.json:1:60: /optimizer/eps: 1e-06 has no effect: it needs optimizer.type adamw, adam, adagrad, rmsprop, muon, lamb, lars or own_matrix. [T0518] hint: leave it out, or change that)"},
    {"NesterovWithoutMomentum", R"({"optimizer": {"type": "sgd", "nesterov": true}})",
     R"(s.json:1:43: /optimizer/nesterov: goes with momentum. [T0525] hint: give "momentum" above 0, such as 0.9)"},
    {"NesterovWithDampening", R"({"optimizer": {"type": "sgd", "momentum": 0.9, "nesterov": true, "dampening": 0.5}})",
     R"(s.json:1:60: /optimizer/nesterov: goes without dampening, which is 0.5. [T0526] hint: leave "dampening" out)"},
    {"CenteredNarrowStates", R"({"optimizer": {"type": "rmsprop", "centered": true, "state_dtype": "8bit"}})",
     R"(s.json:1:47: /optimizer/centered: needs "state_dtype": "fp32", got 8bit. [T0529] hint: leave state_dtype out)"},
    {"AlphaWithAdam", R"({"optimizer": {"alpha": 0.9, "lr_decay": 0.1, "centered": true}})",
     R"(s.json:1:25: /optimizer/alpha: 0.9 has no effect: it needs optimizer.type rmsprop. [T0518] hint: leave it out, or change that)"
     "\n"
     R"(s.json:1:42: /optimizer/lr_decay: 0.1 has no effect: it needs optimizer.type adagrad. [T0518] hint: leave it out, or change that)"
     "\n"
     R"(s.json:1:59: /optimizer/centered: true has no effect: it needs optimizer.type rmsprop. [T0518] hint: leave it out, or change that)"},
    {"FrozenMomentsOfLamb", R"({"optimizer": {"type": "lamb", "freeze_step": 10}})",
     R"(s.json:1:47: /optimizer/freeze_step: 10 has no effect: it needs optimizer.type adamw or adam. [T0518] hint: leave it out, or change that)"},
    {"MuonsNumbersWithoutMuon", R"({"optimizer": {"muon": {"ns_steps": 6}}})",
     R"(s.json:1:37: /optimizer/muon/ns_steps: 6 has no effect: it needs optimizer.type muon. [T0518] hint: leave it out, or change that)"},
    {"TwoClips", R"({"gradient_clipping": 1, "gradient_clip_value": 0.5})",
     R"(s.json:1:49: /gradient_clip_value: cannot stand beside gradient_clipping. [T0530] hint: give one or the other)"},
    {"EmaOfOne", R"({"ema": {"decay": 1}})", R"(s.json:1:19: /ema/decay: must be a number from 0 to below 1, got 1)"},
    {"ClipValueWithLars", R"({"gradient_clip_value": 1, "optimizer": {"type": "lars"}})",
     R"(s.json:1:25: /gradient_clip_value: lars divides by the gradient's norm, which is not known after clipping by value. [T0555] hint: take gradient_clipping)"},
    {"TrustCoefficientWithLamb", R"({"optimizer": {"type": "lamb", "trust_coefficient": 0.1}})",
     R"(s.json:1:53: /optimizer/trust_coefficient: 0.1 has no effect: it needs optimizer.type lars. [T0518] hint: leave it out, or change that)"},
    {"LayerAdaptationWithAdamw", R"({"optimizer": {"groups": [{"layer_adaptation": false}]}})",
     R"(s.json:1:26: /optimizer/groups: group 0 has layer_adaptation, which adamw does not have. [T0552] hint: leave it out)"},
    {"OffloadOfLarsWithoutState",
     R"({"optimizer": {"type": "lars"}, "offload": {"paths": ["a"], "moments": {"tier": "nvme"}}})",
     R"(s.json:1:81: /offload/moments/tier: "nvme" has no effect: it needs an optimizer with states. [T0518] hint: leave it out, or change that)"},
    {"ActivationsOnAuto", R"({"offload": {"activations": {"tier": "auto"}}})",
     R"(s.json:1:38: /offload/activations/tier: must be one of memory, host, nvme, got the string "auto")"},
    {"MastersAndMomentsOnTwoTiers",
     R"({"mixed_precision": {"param": "bf16"}, "offload": {"paths": ["a"], "masters": {"tier": "nvme"}, "moments": {"tier": "host"}}})",
     R"(s.json:1:88: /offload/masters/tier: masters and moments move in one record, so both lie on the tier host or neither. [T0536] hint: give both the same tier, or leave one in "memory")"},
    {"CacheForMomentsOnTheHost", R"({"offload": {"cache": 1, "moments": {"tier": "host"}}})", R"(s.json:1:23: /offload/cache: 1 has no effect: it needs offload.parameters, masters or moments on tier nvme or auto. [T0518] hint: leave it out, or change that)"},
    {"ActivationsWithoutPaths", R"({"offload": {"activations": {"tier": "nvme"}}})",
     R"(s.json:1:38: /offload/activations/tier: the tier nvme needs "paths". [T0534] hint: name one directory on each local disk, such as ["/mnt/nvme0"])"},
    {"PathsForActivationsOnTheHost", R"({"offload": {"paths": ["a"], "activations": {"tier": "host"}}})",
     R"(s.json:1:23: /offload/paths: ["a"] has no effect: it needs an offload tier nvme or auto. [T0518] hint: leave it out, or change that)"},
    {"CacheForActivations", R"({"offload": {"paths": ["a"], "cache": 1, "activations": {"tier": "nvme"}}})",
     R"(s.json:1:39: /offload/cache: 1 has no effect: it needs offload.parameters, masters or moments on tier nvme or auto. [T0518] hint: leave it out, or change that)"},
    {"MinWithoutTier", R"({"offload": {"activations": {"min": 4096}}})",
     R"(s.json:1:37: /offload/activations/min: 4096 has no effect: it needs offload.activations.tier host or nvme. [T0518] hint: leave it out, or change that)"},
    {"StateDtypeWithoutStateOfLars", R"({"optimizer": {"type": "lars", "state_dtype": "bf16"}})",
     R"(s.json:1:47: /optimizer/state_dtype: lars without momentum keeps no state. [T0527] hint: leave state_dtype out)"},
    {"StateDtypeWithoutState", R"({"optimizer": {"type": "sgd", "state_dtype": "bf16"}})",
     R"(s.json:1:46: /optimizer/state_dtype: sgd without momentum keeps no state. [T0527] hint: leave state_dtype out)"},
    {"SplitMastersOfFp16", R"({"mixed_precision": {"param": "fp16", "master": "fp32"}})",
     R"(s.json:1:49: /mixed_precision/master: "fp32" has no effect: it needs mixed_precision.param bf16. [T0518] hint: leave it out, or change that)"},
    {"DampeningWithoutMomentum", R"({"optimizer": {"type": "sgd", "dampening": 0.5}})",
     R"(s.json:1:44: /optimizer/dampening: goes with momentum. [T0525] hint: give "momentum" above 0, such as 0.9)"},
    {"LossScaleWithoutFp16", R"({"mixed_precision": {"param": "bf16", "loss_scale": {"initial": 4}}})",
     R"(s.json:1:65: /mixed_precision/loss_scale/initial: 4.0 has no effect: it needs mixed_precision.param fp16. [T0518] hint: leave it out, or change that)"},
    {"StaticLossScaleThatGrows",
     R"({"mixed_precision": {"param": "fp16", "loss_scale": {"dynamic": false, "growth_factor": 4}}})",
     R"(s.json:1:89: /mixed_precision/loss_scale/growth_factor: 4.0 has no effect: it needs mixed_precision.param fp16 and loss_scale.dynamic true. [T0518] hint: leave it out, or change that)"},
    {"LossScaleBelowMinimum", R"({"mixed_precision": {"param": "fp16", "loss_scale": {"initial": 2, "minimum": 4}}})",
     R"(s.json:1:79: /mixed_precision/loss_scale/minimum: 4 is above the initial scale of 2. [T0524] hint: raise "initial", or lower "minimum")"},
    {"ReduceFp16Alone", R"({"mixed_precision": {"param": "bf16", "reduce": "fp16"}})",
     R"(s.json:1:49: /mixed_precision/reduce: fp16 needs "param": "fp16", got bf16: without loss scaling small gradients vanish. [T0523] hint: take bf16 or fp32)"},
    {"CosineWithoutTotal", R"({"lr_schedule": {"type": "cosine"}})",
     R"(s.json:1:26: /lr_schedule/type: cosine needs "total_steps" above 0. [T0531] hint: give it how many steps the whole run has)"},
    {"WarmupLongerThanTotal", R"({"lr_schedule": {"type": "linear", "total_steps": 10, "warmup_steps": 11}})",
     R"(s.json:1:71: /lr_schedule/warmup_steps: warmup_steps 11 + decay_steps 0 are more than total_steps 10. [T0533] hint: raise total_steps, or lower one of the others)"},
    {"WsdWithoutDecay", R"({"lr_schedule": {"type": "wsd", "total_steps": 10}})",
     R"(s.json:1:26: /lr_schedule/type: wsd needs "decay_steps" above 0: the length of its final decay. [T0532] hint: give it, such as a tenth of total_steps)"},
    {"FeedbackWithFp16",
     R"({"mixed_precision": {"param": "fp16"}, "compression": {"gradients": "int8", "error_feedback": true}})",
     R"(s.json:1:95: /compression/error_feedback: what rounding took from gradients scaled for fp16 does not fit the next scale. [T0539] hint: leave it out, or take bf16)"},
    {"AxesWithoutCompression", R"({"compression": {"axes": "shard"}})",
     R"(s.json:1:26: /compression/axes: "shard" has no effect: it needs compression.gradients or compression.sums other than none. [T0518] hint: leave it out, or change that)"},
    {"SumsThatNobodyGets", R"({"compression": {"sums": "int8"}})",
     R"(s.json:1:26: /compression/sums: "int8" has no effect: it needs a strategy under which ranks get whole sums (NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD). [T0518] hint: leave it out, or change that)"},
    {"FactorsOfShards", R"({"compression": {"method": {"type": "power_sgd"}}})",
     R"(s.json:1:28: /compression/method: {"type":"power_sgd","rank":4} has no effect: it needs strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS. [T0518] hint: leave it out, or change that)"},
    {"MoreThanAll", R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k", "fraction": 1.5}}})",
     R"(s.json:1:82: /compression/method/fraction: must be a number above 0, at most 1, got 1.5)"},
    {"FactorsOfScaledGradients",
     R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k"}}, "mixed_precision": {"param": "fp16"}})",
     R"(s.json:1:52: /compression/method: would see and keep gradients times a loss scale, which changes under fp16. [T0547] hint: take bf16)"},
    {"FactorsInBF16",
     R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k"}}, "mixed_precision": {"param": "bf16", "reduce": "bf16"}})",
     R"(s.json:1:52: /compression/method: sends fp32, and mixed_precision.reduce is bf16. [T0548] hint: leave that out)"},
    {"FactorsOfReplicas",
     R"({"strategy": "NO_SHARD", "mesh": {"replicate": 2}, "compression": {"method": {"type": "top_k"}}})",
     R"(s.json:1:78: /compression/method: needs one replica, whose ranks sum all gradients at once, got 2. [T0549] hint: leave "mesh" out)"},
    {"WsdTooLong", R"({"lr_schedule": {"type": "wsd", "total_steps": 10, "warmup_steps": 5, "decay_steps": 6}})",
     R"(s.json:1:68: /lr_schedule/warmup_steps: warmup_steps 5 + decay_steps 6 are more than total_steps 10. [T0533] hint: raise total_steps, or lower one of the others)"},
    {"StepsOfAConstant", R"({"lr_schedule": {"total_steps": 10, "min_ratio": 0.5}})",
     R"(s.json:1:33: /lr_schedule/total_steps: 10 has no effect: it needs lr_schedule.type linear, cosine, one_cycle or wsd. [T0518] hint: leave it out, or change that)"
     "\n"
     R"(s.json:1:50: /lr_schedule/min_ratio: 0.5 has no effect: it needs lr_schedule.type other than constant and manual. [T0518] hint: leave it out, or change that)"},
    {"TwoWarmups",
     R"({"lr_schedule": {"type": "one_cycle", "total_steps": 9, "warmup_steps": 3, "warmup_share": 0.5}})",
     R"(s.json:1:92: /lr_schedule/warmup_share: 0.5 has no effect: it needs lr_schedule.type one_cycle and warmup_steps 0. [T0518] hint: leave it out, or change that)"},
};
INSTANTIATE_TEST_SUITE_P(Combinations, StrategyErrors, ::testing::ValuesIn(kCombinations),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(StrategyRise, RiseInSamplesIsGivenOnceAndWhereItHasAnEffect) {
  const auto error_of = [](const std::string& schedule) {
    const auto strategy = parse_strategy("{\"lr_schedule\": " + schedule + "}", "s.json");
    return strategy.ok() ? std::string() : message_of(strategy.status());
  };
  using ::testing::AllOf;
  using ::testing::HasSubstr;
  EXPECT_THAT(error_of(R"({"warmup_steps": 3, "warmup_samples": 5})"),
              AllOf(HasSubstr("/lr_schedule/warmup_samples: "), HasSubstr("more than one of warmup_steps"),
                    HasSubstr("hint: give one of them")));
  EXPECT_THAT(error_of(R"({"warmup_samples": 3, "warmup_epochs": 0.5})"), HasSubstr("more than one of"));
  EXPECT_THAT(error_of(R"({"epoch_samples": 3})"), HasSubstr("it needs lr_schedule.warmup_epochs above 0"));
  EXPECT_THAT(error_of(R"({"type": "inverse_sqrt", "warmup_samples": 3})"),
              HasSubstr("it needs lr_schedule.type constant, linear, cosine or wsd"));
  EXPECT_THAT(error_of(R"({"warmup_samples": -1})"), HasSubstr("from 0 to 1e12"));
  EXPECT_EQ(error_of(R"({"type": "cosine", "total_steps": 9, "warmup_epochs": 5, "warmup_from": 0.1})"), "");
}

const BadFile kMethods[] = {
    {"AMethodByItsName", R"({"compression": {"method": "top_k"}})",
     R"(s.json:1:28: /compression/method: must be an object whose "type" is one of none, power_sgd, top_k, random_k, sign_majority, sign_feedback, one_bit, qsgd, terngrad, hook, got the string "top_k")"},
    {"AMethodWithoutAType", R"({"compression": {"method": {"rank": 4}}})",
     R"(s.json:1:28: /compression/method: has no "type", which says what it is. [T0739] hint: give it one of none, power_sgd, top_k, random_k, sign_majority, sign_feedback, one_bit, qsgd, terngrad, hook)"},
    {"AMisspelledMethod", R"({"compression": {"method": {"type": "powersgd"}}})",
     R"(s.json:1:37: /compression/method/type: must be one of none, power_sgd, top_k, random_k, sign_majority, sign_feedback, one_bit, qsgd, terngrad, hook, got the string "powersgd". [T0426] hint: did you mean "power_sgd"?)"},
    {"AMethodOfANumber", R"({"compression": {"method": {"type": 4}}})",
     R"(s.json:1:37: /compression/method/type: must be one of none, power_sgd, top_k, random_k, sign_majority, sign_feedback, one_bit, qsgd, terngrad, hook, got 4)"},
    {"AMisspelledKeyOfAMethod",
     R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k", "fracton": 0.1}}})",
     R"(s.json:1:70: /compression/method/fracton: unknown key of type top_k. [T0426] hint: did you mean "fraction"?)"},
    {"AKeyOfOtherMethods", R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "top_k", "seed": 1}}})",
     R"(s.json:1:70: /compression/method/seed: belongs to type random_k or qsgd or terngrad, and this is of type top_k. [T0740] hint: leave it out, or give the other type)"},
    {"AKeyOfAMethodWithNone", R"({"compression": {"method": {"type": "none", "levls": 1}}})",
     R"(s.json:1:45: /compression/method/levls: unknown key of type none, which has none but "type". [T0741] hint: leave it out)"},
    {"AMethodBesideInt8",
     R"({"strategy": "NO_SHARD", "compression": {"method": {"type": "hook"}, "gradients": "int8"}})",
     R"(s.json:1:52: /compression/method: cannot stand beside "gradients" or "sums" in fewer bits. [T0546] hint: give one or the other)"},
    {"ANumberOfAMethodBesideIt", R"({"compression": {"rank": 4}})",
     R"(s.json:1:18: /compression/rank: unknown key. [T0516] hint: did you mean mesh.rank or compression.method of type power_sgd?)"},
};
INSTANTIATE_TEST_SUITE_P(Methods, StrategyErrors, ::testing::ValuesIn(kMethods),
                         [](const auto& info) { return std::string(info.param.name); });

const BadFile kGathers[] = {
    {"GathersWhereNothingIsSent", R"({"strategy": "NO_SHARD", "compression": {"gathers": "lossless"}})",
     R"(s.json:1:53: /compression/gathers: "lossless" has no effect: it needs a strategy under which ranks send parameters (all but NO_SHARD). [T0518] hint: leave it out, or change that)"},
    {"RoundedWhatStays", R"({"strategy": "SHARD_GRAD_OP", "compression": {"gathers": "int8"}})",
     R"(s.json:1:58: /compression/gathers: is int8, and under SHARD_GRAD_OP what ranks get from each other stays in memory and is updated there. [T0545] hint: take lossless, or FULL_SHARD (or by "placement" cut parameters over "rank"))"},
};
INSTANTIATE_TEST_SUITE_P(Gathers, StrategyErrors, ::testing::ValuesIn(kGathers),
                         [](const auto& info) { return std::string(info.param.name); });

const BadFile kOffloadedSteps[] = {
    {"StepOfStatesInFiles", R"({"offload": {"paths": ["a"], "moments": {"tier": "nvme"}, "step": "cpu"}})",
     R"(s.json:1:67: /offload/step: "cpu" has no effect: it needs offload.masters or moments on tier host or auto. [T0518] hint: leave it out, or change that)"},
    {"ParametersOnHostStay", R"({"strategy": "NO_SHARD", "offload": {"parameters": {"tier": "host"}}})",
     R"(s.json:1:61: /offload/parameters/tier: this strategy keeps all parameters gathered, so they need their memory anyway. [T0537] hint: take "FULL_SHARD" (or by "placement" cut parameters over "rank"), which gathers units when they are used, on one rank too)"},
    {"GradientsOnAuto", R"({"offload": {"gradients": {"tier": "auto"}}})",
     R"(s.json:1:36: /offload/gradients/tier: must be one of memory, host, nvme, got the string "auto")"},
    {"RecordsOfGradients", R"({"offload": {"gradients": {"tier": "host"}, "record": 1048576}})",
     R"(s.json:1:55: /offload/record: 1048576 has no effect: it needs offload.parameters, masters or moments on a tier other than memory, or activations on nvme. [T0518] hint: leave it out, or change that)"},
    {"QueueOfParameters", R"({"offload": {"parameters": {"tier": "host"}, "queue_depth": 2}})",
     R"(s.json:1:61: /offload/queue_depth: 2 has no effect: it needs an offload tier other than memory, but of gradients, of parameters on host, and of masters and moments on host with step cpu. [T0518] hint: leave it out, or change that)"},
    {"QueueOfWhatStays", R"({"offload": {"moments": {"tier": "host"}, "step": "cpu", "queue_depth": 2}})",
     R"(s.json:1:73: /offload/queue_depth: 2 has no effect: it needs an offload tier other than memory, but of gradients, of parameters on host, and of masters and moments on host with step cpu. [T0518] hint: leave it out, or change that)"},
};
INSTANTIATE_TEST_SUITE_P(OffloadedSteps, StrategyErrors, ::testing::ValuesIn(kOffloadedSteps),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(StrategyErrors, DealBySpeedIsRefusedBesideWhatItDoesNotGoWith) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"deal": {"by": "speed"}})", "/deal/by: speed needs gradient_sync last_microbatch"},
      {R"({"deal": {"by": "fast"}})", "/deal/by: must be one of even, speed"},
      {R"({"deal": {"window": 5}})", "/deal/window: 5 has no effect: it needs deal.by speed"},
      {R"({"gradient_sync": "last_microbatch", "gradient_accumulation": 4, "deal": {"by": "speed", "longest": 3}})",
       "/deal/longest: is 3, and ranks have 4 microbatches each at first"},
      {R"({"gradient_sync": "last_microbatch", "gradient_accumulation": 4, "deal": {"by": "speed", "microbatches": 25}})",
       "/deal/microbatches: is 25, and gradient_accumulation, 4, says how many microbatches a step has, too"},
      {R"({"gradient_sync": "last_microbatch", "deal": {"by": "speed", "microbatches": 25}, "optimizer": {"in_backward": true}})",
       "/optimizer/in_backward: cannot stand beside gradient_accumulation above 1"},
      {R"({"gradient_sync": "last_microbatch", "deal": {"by": "speed", "microbatches": 25}, "offload": {"gradients": {"tier": "host"}}})",
       "/offload/gradients/tier: last_microbatch keeps whole gradients in memory"},
      {R"({"deal": {"backups": 2}})", "/deal/backups: 2 has no effect: it needs deal.by speed"},
      {R"({"gradient_sync": "last_microbatch", "deal": {"by": "speed", "backups": 2}})",
       "/deal/backups: needs reproducible: the sum of a step would depend on which rank made a microbatch"},
      {R"({"gradient_sync": "last_microbatch", "deal": {"by": "speed"}, "sync": {"type": "local_sgd", "every": 7}})",
       "/deal/by: speed cannot stand beside a sync.type other than each_step"},
      {R"({"gradient_sync": "last_microbatch", "deal": {"by": "speed"}, "noise_scale": {"every": 5}})",
       "/deal/by: speed cannot stand beside noise_scale"}};
  for (const auto& [text, wanted] : cases) {
    const std::string told = message_of(parse_strategy(text, "s.json").status());
    EXPECT_THAT(told, ::testing::HasSubstr(wanted));
    EXPECT_THAT(told, ::testing::HasSubstr("hint: "));
  }
}

TEST(StrategyErrors, SecondCopyIsRefusedBesideWhatItDoesNotGoWith) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"secondary": {"form": "int4"}})", "/secondary/form: must be one of none, plain, int8"},
      {R"({"secondary": {"ranks": 4}})", "/secondary/ranks: 4 has no effect: it needs secondary.form other than none"},
      {R"({"strategy": "SHARD_GRAD_OP", "secondary": {"form": "plain"}})",
       "/secondary/form: under SHARD_GRAD_OP no unit is gathered twice in a step"},
      {R"({"secondary": {"form": "plain"}, "offload": {"paths": ["a"], "parameters": {"tier": "nvme"}}})",
       "/secondary/form: a second copy is in memory"},
      {R"({"secondary": {"form": "int8"}, "reproducible": true})",
       "/reproducible: cannot stand beside secondary.form int8"}};
  for (const auto& [text, wanted] : cases) {
    const std::string told = message_of(parse_strategy(text, "s.json").status());
    EXPECT_THAT(told, ::testing::HasSubstr(wanted));
    EXPECT_THAT(told, ::testing::HasSubstr("hint: "));
  }
}

TEST(StrategyErrors, NulByteIsRefusedAsNotATextFile) {
  const auto strategy = parse_strategy(std::string("{}\0{\"offload\": 1}", 17), "s.json");
  EXPECT_EQ(
      message_of(strategy.status()),
      "s.json:1:3: /: a NUL byte: this is not a text file. [T0511] hint: name the right file; this one is binary");
}

TEST(StrategyErrors, MillionNestedBracketsAreRefusedWithoutRecursion) {
  for (const char* opening : {"[", "{\"a\":"}) {
    std::string text;
    while (text.size() + 8 < (1 << 20)) text += opening;
    const auto strategy = parse_strategy(text, "s.json");
    EXPECT_THAT(message_of(strategy.status()), ::testing::HasSubstr("nested more than 32 deep")) << opening;
  }
  EXPECT_FALSE(parse_strategy(std::string(1'000'000, '['), "s.json").ok());
}

TEST(StrategyErrors, ManyErrorsAreCountedAndCheap) {
  std::string text = "{";
  for (int i = 0; text.size() < 1'000'000; ++i) text += "\"zzzz" + std::to_string(i) + "\":0,";
  text.back() = '}';
  const std::string message = message_of(parse_strategy(text, "s.json").status());
  EXPECT_EQ(std::count(message.begin(), message.end(), '\n'), 100);
  EXPECT_THAT(message, ::testing::ContainsRegex("\ns.json: and [0-9]+ more errors$"));
}

}  // namespace
}  // namespace tessera
