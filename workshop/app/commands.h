#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::app {

/// The commands of `tessera`, each with the values of its command line. They print, and return the program's exit code
/// (runtime/base/status.h). Only the main files read the command line.

/// The way in which a text is continued, after training and by `tessera sample`.
struct TextSampling {
  std::string prompt;
  std::int64_t tokens = 0;  ///< 0: no sample
  double temperature = 0.8;
  std::int64_t top_k = 0;  ///< draw among the k likeliest tokens; 0: among all
  std::uint64_t seed = 0;
};

/// The options of `tessera train` about checkpoints.
struct CheckpointOptions {
  // Each of these four options, if it is given, replaces the same key of the strategy file's "checkpoint".
  std::optional<std::string> folder;
  std::optional<std::int64_t> every_steps;
  std::optional<double> every_minutes;
  std::optional<std::int64_t> keep;
  bool keep_best = false;       ///< keep the checkpoint with the least loss on held-out data
  std::string resume = "auto";  ///< auto, none or a path (training_checkpoints.h)
  int signal_exit_code = 0;     ///< exit code of a run that saved and ended after a signal
  /// Whether a run with "reproducible" may go on with other threads or instructions (engine/job/processor.h).
  bool allows_other_processor = false;
};

/// Files of measurements from which a step's time is predicted.
struct TimingOptions {
  std::string links;         ///< file that `tessera doctor --links` wrote; empty: nothing is predicted
  std::string links_inside;  ///< links between ranks of one host; empty: as `links`
  std::string profile;       ///< file that `tessera train --profile` wrote
  int servers = 0;           ///< number of parameter servers, if the strategy has servers; 0: one server
};

/// A file of weights, with the fields of LoadOptions (tessera/weights.h).
struct WeightsFile {
  std::string path;
  std::string part;
  std::vector<std::string> without;
};

/// The text or the tokens on which a run trains.
struct TrainData {
  std::string path;  ///< file of tokens, or folder of text
  std::string format = "auto";
  std::vector<std::string> extensions;  ///< extensions of a folder's text files that are read; empty: all
  /// Tokenizer of text: tokenizer.json or its folder, or "bytes"; empty: the tokenizer of init_from or model, else
  /// bytes.
  std::string tokenizer;
  std::int64_t seq_len = 0;  ///< tokens of a sample; 0: the model's sequence length
};

/// The evaluations of a run.
struct TrainEvaluation {
  std::string data;          ///< held-out data, in TrainData::format; empty: no evaluation
  std::int64_t every = 0;    ///< steps between evaluations; 0: after the last step only
  std::int64_t batches = 0;  ///< batches of a rank in an evaluation; 0: all
};

/// The files and folders that a run writes, in addition to its checkpoints. A file with an empty path is not written.
struct TrainOutputs {
  std::string folder;           ///< run directory (run_outputs.h)
  std::string metrics;          ///< one JSON line for each step, or a table (".csv")
  std::string tensorboard;      ///< folder for an event file
  std::string trace;            ///< Chrome trace of the last steps
  std::string trace_operators;  ///< file for a trace with LibTorch's operators and a GPU's kernels
  std::string profile;          ///< file for the seconds that a rank computes with each unit (plan --profile)
  std::string save_weights;     ///< file for the weights
  std::string export_hf;        ///< folder for a model of Hugging Face
  bool overwrite = false;       ///< replace existing results
};

/// The texts that a run prints while it trains.
struct TrainStatus {
  bool plan = false;        ///< print the whole memory plan (TESSERA_PLAN=table)
  std::int64_t every = 10;  ///< steps between status lines
  /// Further texts of status lines: "share", "data", "flops", "straggler" (share_text ... of train_report.h).
  std::vector<std::string> show;
  std::int64_t histogram_every = 0;  ///< steps between latencies in the metrics; 0: calls are not timed
  double peak_tflops = 0;            ///< peak of a rank's device; 0: the known peak of the device
};

/// The options of `tessera train`.
struct TrainCommand {
  std::string model;  ///< model file, or a folder of Hugging Face; empty: the model of init_from
  /// File of safetensors, or folder of Hugging Face, with which training starts; empty: fresh weights.
  std::string init_from;
  WeightsFile load_weights;  ///< weights at the start, under Tessera's names; empty path: none
  std::string strategy;      ///< strategy file
  TrainData data;
  std::int64_t steps = 0;
  std::int64_t batch = 0;  ///< samples of one rank's microbatch
  /// number of samples of a step over all ranks; 0: gradient_accumulation decides
  std::int64_t global_batch = 0;
  std::uint64_t seed = 0;  ///< seed of the weights and of the order of the data
  bool pad_tail = false;   ///< true: an epoch's last step may be short; false: a short step is dropped
  TrainOutputs outputs;
  /// --predict-links, --predict-profile: with these options, the predicted time of a step is shown beside the measured
  /// time.
  TimingOptions predicted_by;
  TrainStatus status;
  TrainEvaluation evaluation;
  CheckpointOptions checkpoints;
  TextSampling sample;
  std::vector<std::string> command_line;  ///< all words of the command line, for the run directory
  bool replays = false;                   ///< steps of another run are repeated (run_replay), and nothing is written
  /// Folder of commits of which one checkpoint is made, without a step (run_from_commits). Empty: the run trains.
  std::string commits;
};
/// Trains a model. Each rank is a process.
int run_train(const TrainCommand& command);

/// The options of `tessera replay`.
struct ReplayCommand {
  std::string from;               ///< a checkpoint, a folder of checkpoints, or "none": the run's start
  std::int64_t step = 0;          ///< the last step that is repeated, which is the one that is compared
  int ranks = 1;                  ///< processes to start here, if no launcher has started any
  std::string find;               ///< "nonfinite" or "divergence"; empty: only step `step` is compared
  std::string hashes;             ///< file of the run's "record_hashes"; empty: the file that the run wrote, if any
  std::int64_t microbatches = 0;  ///< number of microbatches of a step on all ranks; 0: files of the run give the
                                  ///< number
  TrainCommand run;               ///< the options with which the run was started
  std::vector<std::string> words = {};  ///< all words of the command line after the program's name
};
/// Repeats steps of a run of `tessera train` (docs/reproducible.md).
int run_replay(const ReplayCommand& command);

/// The options of `tessera serve`.
struct ServeCommand {
  std::string listen = "127.0.0.1:0";  ///< HOST:PORT; port 0: any free port
  std::string state;                   ///< folder in which shards are saved (KeepOptions); empty: no shard is saved
  std::int64_t lose = 16;              ///< KeepOptions::lose
  std::string offload;                 ///< folder for scratch files with shards; empty: shards are in memory
};
/// Serves shards to ranks with "sync": {"owners": "servers"}. The command runs until SIGTERM or SIGINT comes, or, after
/// SIGUSR1, until no worker is connected or awaited (ParameterServer::may_end). Prints the address at which it listens.
int run_serve(const ServeCommand& command);

/// The options of `tessera sample`.
struct SampleCommand {
  std::string model;  ///< model file, or a folder of Hugging Face
  /// file that PyTorch or `tessera train` wrote, or safetensors; empty path: the weights in the folder `model`
  WeightsFile weights;
  std::string tokenizer;  ///< see TrainData
  TextSampling sample;
};
/// Continues a text with saved weights, in one process.
int run_sample(const SampleCommand& command);

/// The options of `tessera tokenize`.
struct TokenizeCommand {
  std::string tokenizer;  ///< tokenizer.json or its folder
  std::string data;       ///< file or folder of text
  std::vector<std::string> extensions;
  std::string out;  ///< prefix of the two files
  std::string end;  ///< token after each file, such as <|endoftext|>; empty: none
  bool overwrite = false;
};
/// Turns text into tokens on disk, in Megatron's format.
int run_tokenize(const TokenizeCommand& command);

/// Options that describe the model, the strategy and the ranks of a job that need not run, as for `tessera plan`.
struct WorldCommand {
  std::string model;
  std::string strategy;
  int world_size = 1;
  int hosts = 1;
};

/// Options that say how ranks differ (WorldOptions in planner/rank_speeds.h).
struct UnlikeRanks {
  double jitter = 0;                         ///< relative standard deviation of the ranks' compute times
  std::vector<std::string> stragglers = {};  ///< "7=1.5": a rank, and the factor by which its work takes longer
  std::string stall = {};  ///< "0.02=1": share of a rank's steps in which the rank stands still, and the seconds of
                           ///< each such stop; empty: none

  bool differ() const { return jitter > 0 || !stragglers.empty() || !stall.empty(); }
};

/// The options of `tessera plan`.
struct PlanCommand {
  WorldCommand world;
  TimingOptions timing;
  bool json = false;
  /// Whether the speed of the disks of offload.paths is measured now, to predict how long a step's traffic takes on
  /// them.
  bool measure_disks = false;
  // These fields are for the world.strategy "auto", which compares all strategies.
  std::string like;  ///< strategy file with the other keys; empty: their defaults
  /// numbers of microbatches of a step that are tried; empty: the number of `like`
  std::vector<std::int64_t> accumulations;
  UnlikeRanks ranks;  ///< ranks for which the modes of "sync" are compared (sync_modes.h)
  std::string write;  ///< file for the chosen strategy; empty: none
  bool overwrite = false;
};
/// Prints the memory and the messages of every rank of a world of any size. If there are measurements, the command also
/// prints the time of a step. The command does not run the model.
int run_plan(const PlanCommand& command);

/// The options of `tessera simulate`.
struct SimulateCommand {
  WorldCommand world;
  TimingOptions timing;
  UnlikeRanks ranks;
  std::uint64_t seed = 1;
  std::int64_t steps = 10;
  std::string trace;  ///< Chrome trace of some ranks; empty: none
  int traced_ranks = 4;
  std::string order;  ///< file for the order of pushes and pulls (SimulatedOrder); empty: none
  bool overwrite = false;
};
/// Simulates steps of ranks that differ in speed.
int run_simulate(const SimulateCommand& command);

/// The options of `tessera bench`. The sections that read an option stand before its meaning, or in parentheses after
/// it.
struct BenchCommand {
  std::string json;        ///< file for all samples; empty: none
  std::string csv;         ///< file for the table (buckets); empty: none
  bool overwrite = false;  ///< replace existing results
  std::string cifar10;     ///< folder of CIFAR-10's binary files (buckets); empty: images are generated
  std::string transport;   ///< "host", "gloo" or "mpi"; empty: the best available one
  int ranks = 2;           ///< number of ranks to start, if no launcher has started any
  bool quick = false;
  std::string fit_file;         ///< file for the fit (collectives); empty: none
  bool fit = false;             ///< collectives: measure the algorithms over a network, and fit their costs
  double compute_s = 0.6;       ///< overlap: seconds of compute in a step
  int units = 8;                ///< overlap: units of the model
  bool gpu = false;             ///< optimizer, launches: run on the GPU
  std::int64_t parameters = 0;  ///< optimizer: parameters of a step; 0: the usual number
  std::string isa;              ///< optimizer: instruction set of its loops on the CPU; empty: the best
  std::string directory;        ///< offload: directory for scratch files
  std::int64_t disk_bytes = std::int64_t{8} << 30;    ///< offload: bytes that one pass over the disk moves
  std::int64_t record_bytes = std::int64_t{2} << 20;  ///< offload.record (offload)
  std::int64_t queue_depth = 8;                       ///< offload.queue_depth (offload)
  std::int64_t cache_bytes = 0;                       ///< offload.cache; 0: none (offload)
};
/// Times every collective in each kind of memory, after checking its result. If a fit is asked for, the command times
/// every algorithm of the collectives over a network. The command starts its ranks itself if this process is alone.
int run_bench_collectives(const BenchCommand& command);
/// Trains a ResNet-18 and a GPT under NO_SHARD with buckets of many sizes, and prints which bucket size is fastest, and
/// why. The command starts its ranks itself if this process is alone.
int run_bench_buckets(const BenchCommand& command);
/// Times a step and its parts under every strategy, and compares them with those of ranks that train alone. This
/// function and the next four start their ranks themselves if this process is alone.
int run_bench_step(const BenchCommand& command);
/// Compares the memory of an Engine under every strategy with the plan.
int run_bench_memory(const BenchCommand& command);
/// Measures the time that Tessera costs the host for each operator.
int run_bench_overhead(const BenchCommand& command);
/// Measures how much longer a step takes if parts of it are timed.
int run_bench_times(const BenchCommand& command);
/// Times saves and loads of a checkpoint of AdamW's state under --dir. Training waits for some of the saves, and others
/// run beside training (checkpoint.async).
int run_bench_checkpoint(const BenchCommand& command);
/// Measures the time that each unit costs the host that launches a GPU's work.
int run_bench_launches(const BenchCommand& command);
/// Measures how much of the communication is hidden behind compute. The compute is a timed sleep. The command
/// starts its ranks itself if this process is alone.
int run_bench_overlap(const BenchCommand& command);
/// Times the optimizer's step in every format, on one thread or on the GPU.
int run_bench_optimizer(const BenchCommand& command);
int run_bench_codecs(const BenchCommand& command);
/// Times passes over a directory's disk with io_uring and with threads, and optimizer steps whose states lie on that
/// disk.
int run_bench_offload(const BenchCommand& command);

/// The options of `tessera checkpoint`. Each comment begins with the commands that read the option.
struct CheckpointCommand {
  std::string path;            ///< a checkpoint, or a folder of checkpoints
  std::string other;           ///< diff: the second checkpoint
  bool json = false;           ///< show: print the manifest itself
  std::string folder;          ///< export: folder for the model
  std::string dtype = "fp32";  ///< export: type of the weights
  bool overwrite = false;      ///< export: replace existing files
  std::string to;              ///< reshard: folder for the new checkpoint
  std::int64_t files = 0;      ///< reshard: number of files of the new checkpoint
};
/// The next commands read checkpoints without a model. This command lists the checkpoints of a folder, one per line.
int run_checkpoint_ls(const CheckpointCommand& command);
/// Prints the content of one checkpoint.
int run_checkpoint_show(const CheckpointCommand& command);
/// Reads and hashes every byte, and names everything that is damaged. Returns 65 if anything is damaged.
int run_checkpoint_verify(const CheckpointCommand& command);
/// Lists the tensors that differ between two checkpoints, and the size of the differences. Returns 1 if there are such
/// tensors.
int run_checkpoint_diff(const CheckpointCommand& command);
/// Writes a checkpoint again, divided into another number of files.
int run_checkpoint_reshard(const CheckpointCommand& command);
/// Writes the weights of a checkpoint of `tessera train` as a model of Hugging Face.
int run_checkpoint_export(const CheckpointCommand& command);

/// The options of `tessera checkpoint from-commits`.
struct FromCommitsCommand {
  std::string commits;                  ///< folder of commits (DurableConfig::dir), with the files of all ranks
  std::string to;                       ///< folder of checkpoints that gets the new one
  int hosts = 0;                        ///< hosts of the run that committed, each with equally many ranks; 0: as the
                                        ///< commits say
  TrainCommand run;                     ///< the options with which the run was started
  std::vector<std::string> words = {};  ///< all words of the command line after the program's name
};
/// Makes a checkpoint of the last commit of a run. The command starts the run's ranks here, if no launcher has started
/// them.
int run_from_commits(const FromCommitsCommand& command);

/// The options of `tessera doctor`.
struct DoctorCommand {
  std::vector<std::string> disks;  ///< directories
  std::string links;               ///< file for measurements between ranks; empty: nothing is measured
  std::string transport;  ///< transport for these measurements: "host", "gloo" or "mpi"; empty: the best there is
  bool overwrite = false;
};
/// Measures collectives between the ranks and writes their fit, if `links` is set. Every rank calls this function.
int run_doctor_links(const DoctorCommand& command);
/// Inspects this machine. Prints what Tessera finds, what is missing, and how to repair it. Measures the disks of the
/// directories `disks`, with a private scratch file on each. Returns 69 if something that Tessera needs is missing,
/// else 0.
int run_doctor(const DoctorCommand& command);

}  // namespace tessera::app
