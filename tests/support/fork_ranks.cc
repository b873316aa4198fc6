#include "tests/support/fork_ranks.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <stdexcept>
#include <thread>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

struct Entry {
  char key[200];
  char value[1300];
};

struct Table {
  pthread_mutex_t mutex;
  int used;
  Entry entries[1000];
};

class ForkedStore : public KeyValueStore {
 public:
  ForkedStore() {
    void* memory = mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    table_ = static_cast<Table*>(memory);
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&table_->mutex, &attributes);
  }
  ~ForkedStore() override { munmap(table_, sizeof(Table)); }

  absl::Status set(const std::string& key, const std::string& value) override {
    Lock lock(*table_);
    write(key, value);
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> get(const std::string& key, std::chrono::milliseconds timeout) override {
    for (const auto end = Clock::now() + timeout;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
      {
        Lock lock(*table_);
        if (const Entry* entry = find(key)) return std::string(entry->value);
      }
      if (Clock::now() >= end) return make_error(ExitCode::kPeerLost, "no '" + key + "'");
    }
  }
  absl::StatusOr<bool> has(const std::string& key) override {
    Lock lock(*table_);
    return find(key) != nullptr;
  }
  absl::StatusOr<std::int64_t> add(const std::string& key, std::int64_t amount) override {
    Lock lock(*table_);
    const Entry* entry = find(key);
    const std::int64_t sum = (entry ? std::stoll(entry->value) : 0) + amount;
    write(key, std::to_string(sum));
    return sum;
  }

 private:
  struct Lock {
    explicit Lock(Table& table) : table(table) {
      if (pthread_mutex_lock(&table.mutex) == EOWNERDEAD) pthread_mutex_consistent(&table.mutex);
    }
    ~Lock() { pthread_mutex_unlock(&table.mutex); }
    Table& table;
  };

  Entry* find(const std::string& key) const {
    for (int i = 0; i < table_->used; ++i)
      if (key == table_->entries[i].key) return &table_->entries[i];
    return nullptr;
  }
  void write(const std::string& key, const std::string& value) {
    Entry* entry = find(key);
    if (!entry) entry = &table_->entries[table_->used++];
    std::snprintf(entry->key, sizeof entry->key, "%s", key.c_str());
    std::snprintf(entry->value, sizeof entry->value, "%s", value.c_str());
  }

  Table* table_;
};

[[noreturn]] void run_child(int rank, const ForkedRanks::Body& body, KeyValueStore& store) {
  absl::Status status;
  try {
    status = body(rank, store);
  } catch (const std::exception& error) {
    status = make_error(ExitCode::kInternal, error.what());
  }
  (void)store.set("end/" + std::to_string(rank), message_of(status));
  std::fflush(nullptr);
  _exit(static_cast<int>(exit_code_of(status)));
}

}  // namespace

std::shared_ptr<KeyValueStore> forked_store() { return std::make_shared<ForkedStore>(); }

ForkedRanks::ForkedRanks(int ranks, const Body& body) : store_(forked_store()) {
  std::fflush(nullptr);
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) throw std::runtime_error("fork");
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);  // if a test is killed, its ranks end too
      run_child(rank, body, *store_);
    }
    pids_.push_back(pid);
  }
}

ForkedRanks::~ForkedRanks() {
  for (pid_t pid : pids_) {
    if (pid <= 0) continue;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

void ForkedRanks::signal(int rank, int number) const { kill(pids_[rank], number); }

RankEnd ForkedRanks::wait(int rank, std::chrono::duration<double> at_rest) {
  Deadline limit(at_rest);
  return wait(rank, limit);
}

RankEnd ForkedRanks::wait(int rank, Deadline& limit) {
  int status = 0;
  while (waitpid(pids_[rank], &status, WNOHANG) == 0) {
    if (limit.passed()) kill(pids_[rank], SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  pids_[rank] = 0;
  RankEnd result;
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  if (WIFEXITED(status)) result.exit_code = static_cast<ExitCode>(WEXITSTATUS(status));
  result.message = store_->get("end/" + std::to_string(rank), std::chrono::milliseconds(0)).value_or("");
  return result;
}

absl::StatusOr<std::string> told(KeyValueStore& store, const std::string& key, std::chrono::duration<double> at_rest) {
  for (Deadline limit(at_rest);;) {
    auto value = store.get(key, std::chrono::milliseconds(100));
    if (value.ok() || limit.passed()) return value;
  }
}

std::vector<RankEnd> fork_ranks(int ranks, const ForkedRanks::Body& body) {
  ForkedRanks forked(ranks, body);
  Deadline limit(std::chrono::seconds(60));  // all ranks share this limit
  std::vector<RankEnd> ends;
  for (int rank = 0; rank < ranks; ++rank) ends.push_back(forked.wait(rank, limit));
  return ends;
}

}  // namespace tessera
