#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::app {

/// The commands of `tessera`, each with what its command line says. They print, and return the program's exit code
/// (runtime/base/status.h); main.cc alone knows how a command line is read.

struct TextSampling {
  std::string prompt;
  std::int64_t tokens = 0;  ///< 0: no sample
  double temperature = 0.8;
  std::int64_t top_k = 0;  ///< 0: among all
  std::uint64_t seed = 0;
};

struct CheckpointOptions {
  // What is given wins over the strategy file's "checkpoint".
  std::optional<std::string> folder;
  std::optional<std::int64_t> every_steps;
  std::optional<double> every_minutes;
  std::optional<std::int64_t> keep;
  bool keep_best = false;       ///< the one of the least loss on held-out data
  std::string resume = "auto";  ///< auto, none or a path (training_checkpoints.h)
  int signal_exit_code = 0;     ///< of a run that saved and ended since a signal came
};

/// Measurements from which a step's time is predicted.
struct TimingOptions {
  std::string links;         ///< of `tessera doctor --links`; empty: nothing is predicted
  std::string links_inside;  ///< the same between ranks of one host; empty: as `links`
  std::string profile;       ///< of `tessera train --profile`
};

/// A file of weights, and what LoadOptions says of it (tessera/weights.h).
struct WeightsFile {
  std::string path;
  std::string part;
  std::vector<std::string> without;
};

struct TrainCommand {
  std::string model;  ///< model file, or a folder of Hugging Face; empty: init_from's
  std::string
      init_from;  ///< safetensors that training starts from: a folder of Hugging Face or a file; empty: fresh weights
  WeightsFile load_weights;  ///< that training starts from, with the names that Tessera gives; no path: none
  std::string strategy;      ///< strategy file
  std::string data;
  std::string data_format = "auto";
  std::vector<std::string> extensions;  ///< of a folder's text files; empty: all files
  std::int64_t steps = 0;
  std::int64_t batch = 0;         ///< samples of one rank's microbatch
  std::int64_t global_batch = 0;  ///< samples of a step, over all ranks; 0: as many as gradient_accumulation makes
  std::int64_t seq_len = 0;       ///< 0: the model's
  std::uint64_t seed = 0;         ///< of the weights and of the order of the data
  std::string
      tokenizer;  ///< of text: tokenizer.json or its folder, or "bytes"; empty: that of init_from or model, else bytes
  bool pad_tail = false;        ///< an epoch's last step may be short instead of dropped
  std::string out;              ///< run directory (run_outputs.h); empty: none
  std::string metrics;          ///< JSON lines, a step each, or a table (".csv"); empty: none
  std::string trace;            ///< Chrome trace of the last steps; empty: none
  std::string trace_operators;  ///< likewise, of LibTorch's operators and a GPU's kernels
  std::string profile;          ///< what a rank alone computes with each unit, in seconds (plan --profile); empty: none
  TimingOptions
      predicted_by;  ///< --predict-links, --predict-profile: the step that they let expect is shown beside the measured one
  std::string save_weights;  ///< empty: not saved
  std::string export_hf;     ///< folder for a model of Hugging Face; empty: not written
  bool overwrite = false;    ///< replace existing results
  bool plan = false;         ///< say the whole memory plan (TESSERA_PLAN=table)
  std::int64_t log_every = 10;
  std::string eval_data;          ///< held out, in data_format; empty: no evaluation
  std::int64_t eval_every = 0;    ///< steps between evaluations; 0: after the last step only
  std::int64_t eval_batches = 0;  ///< of a rank and evaluation; 0: all
  CheckpointOptions checkpoints;
  TextSampling sample;
  std::vector<std::string> command_line;  ///< the whole, for the run directory
  std::string tensorboard = {};           ///< folder for an event file; empty: none
};
/// Trains. One process a rank.
int run_train(const TrainCommand& command);

struct SampleCommand {
  std::string model;      ///< model file, or a folder of Hugging Face
  WeightsFile weights;    ///< as PyTorch or `tessera train` wrote them, or safetensors; no path: the folder `model`'s
  std::string tokenizer;  ///< as TrainCommand's
  TextSampling sample;
};
/// Continues a text with saved weights, in one process.
int run_sample(const SampleCommand& command);

struct TokenizeCommand {
  std::string tokenizer;  ///< tokenizer.json or its folder
  std::string data;       ///< file or folder of text
  std::vector<std::string> extensions;
  std::string out;  ///< prefix of the two files
  std::string end;  ///< token behind each file, such as <|endoftext|>; empty: none
  bool overwrite = false;
};
/// Turns text into tokens on disk, in Megatron's format.
int run_tokenize(const TokenizeCommand& command);

/// A world that need not be there.
struct WorldCommand {
  std::string model;
  std::string strategy;
  int world_size = 1;
  int hosts = 1;
};

struct PlanCommand {
  WorldCommand world;
  TimingOptions timing;
  bool json = false;
  bool measure_disks = false;  ///< of offload.paths, here and now, to say what a step's traffic costs
  // Where world.strategy is "auto", so that all strategies are compared.
  std::string like;                         ///< strategy file with the other keys; empty: their defaults
  std::vector<std::int64_t> accumulations;  ///< microbatches of a step to try; empty: as `like` has them
  std::string write;                        ///< file for the strategy that is chosen; empty: none
  bool overwrite = false;
};
/// Prints what every rank of a world of any size would allocate and send, and with measurements how long a step would take, without
/// running anything.
int run_plan(const PlanCommand& command);

struct SimulateCommand {
  WorldCommand world;
  TimingOptions timing;
  double jitter = 0;  ///< relative standard deviation of what ranks compute
  std::uint64_t seed = 1;
  std::vector<std::string> stragglers;  ///< "7=1.5": a rank, and how many times as long its work takes
  std::int64_t steps = 10;
  std::string trace;  ///< Chrome trace of some ranks; empty: none
  int traced_ranks = 4;
  bool overwrite = false;
};
/// Plays steps of ranks that are not alike.
int run_simulate(const SimulateCommand& command);

struct BenchCommand {
  std::string json;        ///< file for all samples; empty: none
  std::string csv;         ///< file for the table (buckets); empty: none
  bool overwrite = false;  ///< replace existing results
  std::string cifar10;     ///< folder of CIFAR-10's binary files (buckets); empty: images are generated
  std::string transport;   ///< "host" or "gloo"; empty: the best there is
  int ranks = 2;           ///< to start, where no launcher has
  bool quick = false;
  std::string fit_file;                             ///< gets the fit (collectives); empty: none
  bool fit = false;                                 ///< the ways over a network, and a fit of their costs (collectives)
  double compute_s = 0.6;                           ///< of a step (overlap)
  int units = 8;                                    ///< of the model (overlap)
  bool gpu = false;                                 ///< on the GPU (optimizer, launches)
  std::int64_t parameters = 0;                      ///< of a step; 0: as many as show the limit (optimizer)
  std::string isa;                                  ///< of its loops on the CPU; empty: the best
  std::string directory;                            ///< for scratch files (offload)
  std::int64_t disk_bytes = std::int64_t{8} << 30;  ///< of a pass over the disk (offload)
  std::int64_t record_bytes = std::int64_t{2} << 20;  ///< offload.record (offload)
  std::int64_t queue_depth = 8;                       ///< offload.queue_depth (offload)
  std::int64_t cache_bytes = 0;                       ///< offload.cache; 0: none (offload)
};
/// Times every collective in memory of every kind, after checking its result; or, for a fit, every algorithm of those over Gloo. Alone, it
/// starts its ranks itself.
int run_bench_collectives(const BenchCommand& command);
/// Trains a ResNet-18 and a GPT under NO_SHARD with buckets of many sizes, and says which wins and why. Alone, it
/// starts its ranks itself.
int run_bench_buckets(const BenchCommand& command);
/// Times a step and its parts under every strategy, beside ranks that train alone; puts memory beside the plan;
/// measures what an operator costs the host. Alone, they start their ranks themselves.
int run_bench_step(const BenchCommand& command);
int run_bench_memory(const BenchCommand& command);
int run_bench_overhead(const BenchCommand& command);
/// Times saves and loads of a checkpoint of AdamW's state, beside training and not, under --dir.
int run_bench_checkpoint(const BenchCommand& command);
/// Measures what a unit costs the host that feeds a GPU.
int run_bench_launches(const BenchCommand& command);
/// Measures how much of the communication is hidden behind compute that is a timed sleep.
int run_bench_overlap(const BenchCommand& command);
/// Times the optimizer's step in every format, on one thread or on the GPU.
int run_bench_optimizer(const BenchCommand& command);
/// Times passes over a directory's disk by io_uring and by threads, and optimizer steps whose states lie there.
int run_bench_offload(const BenchCommand& command);

struct CheckpointCommand {
  std::string path;            ///< a checkpoint, or a folder of checkpoints
  std::string other;           ///< diff: the second one
  bool json = false;           ///< show: the manifest itself
  std::string folder;          ///< export: for the model
  std::string dtype = "fp32";  ///< export: of the weights
  bool overwrite = false;      ///< export
  std::string to;              ///< reshard: folder for the new checkpoint
  std::int64_t files = 0;      ///< reshard
};
/// Look at checkpoints without a model. They read files only.
/// The checkpoints of a folder, a line each.
int run_checkpoint_ls(const CheckpointCommand& command);
/// What one holds.
int run_checkpoint_show(const CheckpointCommand& command);
/// Reads and hashes every byte; names all that is damaged (65).
int run_checkpoint_verify(const CheckpointCommand& command);
/// Tensors that differ between two, and by how much. 1 if some do.
int run_checkpoint_diff(const CheckpointCommand& command);
/// Writes one anew, cut into another number of files.
int run_checkpoint_reshard(const CheckpointCommand& command);
/// Writes the weights of one that `tessera train` made as a model of Hugging Face.
int run_checkpoint_export(const CheckpointCommand& command);

struct DoctorCommand {
  std::vector<std::string> disks;  ///< directories
  std::string links;               ///< file for what is measured between ranks; empty: nothing is
  std::string transport;           ///< for that; "host" or "gloo"; empty: the best there is
  bool overwrite = false;
};
/// With `links`, on every rank: measures collectives between the ranks and writes their fit.
int run_doctor_links(const DoctorCommand& command);
/// Looks at this machine and says what Tessera finds, what is missing, and how to mend it. Measures the disks of
/// `disks`, directories, with a private scratch file on each. Returns 0 unless something that Tessera cannot do without
/// is missing (69).
int run_doctor(const DoctorCommand& command);

}  // namespace tessera::app
