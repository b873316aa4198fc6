#include "tests/support/workplace.h"

#include <signal.h>

#include <chrono>
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "tests/support/free_port.h"

namespace tessera::testing {
namespace {

constexpr char kModel[] = R"({"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 3, "width": 32, "heads": 2})";

// Returns a text whose words do not repeat periodically.
std::string some_text() {
  static const char* const kWords[] = {"gather", "wait", "release", "shard", "unit",
                                       "mesh",   "rank", "plan",    "\n",    "step"};
  std::string text;
  unsigned state = 1;
  for (int i = 0; i < 4000; ++i) {
    state = state * 1664525u + 1013904223u;
    text += kWords[(state >> 24) % 10];
    text += ' ';
  }
  return text;
}

}  // namespace

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Workplace::Workplace() {
  write_file(path("model.json"), kModel);
  write_file(path("text"), some_text());
}

std::string Workplace::strategy(const std::string& name, const std::string& more) const {
  const std::string file = path(name + ".json");
  write_file(file, R"({"strategy": ")" + name +
                       R"(", "units": {"classes": ["Block"]}, "mixed_precision": {"param": "bf16"},
    "optimizer": {"lr": 0.01}, "gradient_clipping": 1.0, "gradient_accumulation": 2)" +
                       more + "}");
  return file;
}

Words Workplace::train(const std::string& strategy, const std::string& metrics, const Words& more) const {
  return Words{TESSERA_PROGRAM, "train",   "--model",   path("model.json"), "--strategy", strategy, "--data",
               path("text"),    "--steps", "3",         "--batch",          "2",          "--seed", "7",
               "--log-every",   "1",       "--metrics", path(metrics)} +
         more;
}

Words Workplace::launch(int ranks, const Words& more) {
  return Words{TESSERA_PROGRAM, "launch", "-n", std::to_string(ranks)} + more + Words{"--"};
}

void Workplace::wait_for(const Program& job, const std::string& file, const std::string& text) const {
  for (Deadline limit(std::chrono::seconds(60)); read_file(file).find(text) == std::string::npos;) {
    ASSERT_FALSE(limit.passed()) << job.out() << job.err();
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

Ended Workplace::run(const Words& command, double at_rest_s) const {
  Ended ended = run_program(command, path("run"), at_rest_s);
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  return ended;
}

std::vector<nlohmann::json> Workplace::steps(const std::string& metrics) const {
  std::vector<nlohmann::json> lines = read_lines(path(metrics));
  std::erase_if(lines, [](const nlohmann::json& line) { return !line.contains("step"); });
  return lines;
}

std::vector<std::string> Workplace::losses(const std::string& metrics) const {
  std::vector<std::string> texts;
  for (const nlohmann::json& line : steps(metrics)) {
    char text[128];
    std::snprintf(text, sizeof text, "%d %.17g %.17g", line.at("step").get<int>(), line.at("loss").get<double>(),
                  line.at("grad_norm").get<double>());
    texts.push_back(text);
  }
  return texts;
}

std::multiset<std::string> steps_told_of(const std::string& out) {
  std::multiset<std::string> told;
  std::istringstream words(out);
  for (std::string word, next; words >> word;)
    if (word == "step" && words >> next && next.find('/') != std::string::npos) told.insert(next);
  return told;
}

std::string address_to_join(const Program& launcher) {
  const std::string before = "workers join by --join ";
  for (Deadline limit(std::chrono::seconds(60)); launcher.err().find(before) == std::string::npos;) {
    if (limit.passed()) throw std::runtime_error("the launcher prints no address to join: " + launcher.err());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string err = launcher.err();
  std::string at;
  std::istringstream(err.substr(err.find(before) + before.size())) >> at;
  return at;
}

std::string free_port() { return std::to_string(tessera::free_port()); }

std::string torchrun() { return TESSERA_SOURCE "/.venv/bin/torchrun"; }

Words elastic_host(const std::string& port) {
  // If a host joins, torchrun of PyTorch 2.15 waits for ever, unless each start gets its own store.
  return Words{"/usr/bin/env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "OMP_NUM_THREADS=1"} +
         Words{torchrun(), "--no-python", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9"} +
         Words{"--monitor-interval", "0.2", "--local-addr", "127.0.0.1", "--rdzv-backend", "c10d", "--rdzv-id", "e"} +
         Words{"--rdzv-endpoint", "127.0.0.1:" + port, "--rdzv-conf"} +
         Words{"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"};
}

KilledHost::~KilledHost() {
  const std::vector<pid_t> ranks = agent.descendants();
  kill(agent.pid(), SIGKILL);
  for (const pid_t pid : ranks) kill(pid, SIGKILL);
}

}  // namespace tessera::testing
