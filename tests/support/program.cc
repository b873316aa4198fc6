#include "tests/support/program.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace tessera::testing {
namespace {

struct ProcessEntry {
  pid_t pid = 0, parent = 0;
  char state = '?';
};

std::vector<ProcessEntry> all_processes() {
  std::vector<ProcessEntry> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string stat = read_file(entry.path() / "stat");
    const auto bracket = stat.rfind(')');
    if (bracket == std::string::npos) continue;  // the process has ended since then
    ProcessEntry process;
    process.pid = std::stoi(name);
    std::istringstream(stat.substr(bracket + 1)) >> process.state >> process.parent;
    all.push_back(process);
  }
  return all;
}

}  // namespace

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

std::vector<nlohmann::json> read_lines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(read_file(path));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<std::string> shared_memory_names() {
  std::vector<std::string> names;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> shared_memory_left(const std::vector<std::string>& before) {
  const auto is_in = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<std::string> left = shared_memory_names();
  std::erase_if(left, [&](const std::string& name) { return is_in(before, name); });
  for (Deadline limit(std::chrono::seconds(5)); !left.empty() && !limit.passed();) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::vector<std::string> now = shared_memory_names();
    std::erase_if(left, [&](const std::string& name) { return !is_in(now, name); });
  }
  return left;
}

bool is_alive(pid_t pid) {
  const auto all = all_processes();
  return std::any_of(all.begin(), all.end(), [&](const ProcessEntry& p) { return p.pid == pid && p.state != 'Z'; });
}

Program::Program(const std::vector<std::string>& command, const std::string& folder,
                 const std::map<std::string, std::string>& environment)
    : folder_(folder) {
  std::filesystem::create_directories(folder);
  std::vector<char*> arguments;
  for (const std::string& argument : command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  const std::string out = folder + "/out", err = folder + "/err";
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("fork failed");
  if (pid_ > 0) return;
  setpgid(0, 0);
  dup2(open("/dev/null", O_RDONLY), 0);
  dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 1);
  dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644), 2);
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  execvp(arguments[0], arguments.data());
  _exit(127);
}

Program::~Program() {
  if (reaped_) return;
  kill(-pid_, SIGKILL);
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::string Program::out() const { return read_file(folder_ + "/out"); }
std::string Program::err() const { return read_file(folder_ + "/err"); }

Ended Program::wait(double at_rest_s) {
  Deadline limit{std::chrono::duration<double>(at_rest_s)};
  Ended ended;
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (limit.passed()) {
      kill(-pid_, SIGKILL);
      waitpid(pid_, &status, 0);
      reaped_ = true;
      ended.out = out();
      ended.seconds = limit.seconds();
      ended.err = err() + "\n(killed by the test after " + std::to_string(ended.seconds) + " s)";
      return ended;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  reaped_ = true;
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  ended.out = out();
  ended.err = err();
  ended.seconds = limit.seconds();
  return ended;
}

std::vector<pid_t> Program::descendants() const {
  const auto all = all_processes();
  std::vector<pid_t> found = {pid_};
  for (std::size_t i = 0; i < found.size(); ++i) {
    for (const ProcessEntry& process : all)
      if (process.parent == found[i] && process.state != 'Z') found.push_back(process.pid);
  }
  found.erase(found.begin());
  return found;
}

pid_t Program::rank_pid(int rank) const {
  const std::string wanted = "RANK=" + std::to_string(rank);
  for (pid_t pid : descendants()) {
    std::istringstream environment(read_file("/proc/" + std::to_string(pid) + "/environ"));
    for (std::string entry; std::getline(environment, entry, '\0');)
      if (entry == wanted) return pid;
  }
  return 0;
}

bool Program::wait_for_rank(int rank, double at_rest_s) const {
  for (Deadline limit{std::chrono::duration<double>(at_rest_s)}; rank_pid(rank) == 0;) {
    if (limit.passed()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

Ended run_program(const std::vector<std::string>& command, const std::string& folder, double at_rest_s,
                  const std::map<std::string, std::string>& environment) {
  return Program(command, folder, environment).wait(at_rest_s);
}

}  // namespace tessera::testing
