#include "tests/oracle/child.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "runtime/base/status.h"
#include "tests/support/limits/patience.h"

namespace tessera::oracle {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string quoted(const std::string& word) {
  std::string text = "'";
  for (char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

}  // namespace

bool python_has(const std::vector<std::string>& modules) {
  std::string command =
      TESSERA_ORACLE_PYTHON " -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, sys.argv[1:])))'";
  for (const std::string& module : modules) command += " " + module;
  return std::system((command + " > /dev/null 2>&1").c_str()) == 0;
}

bool python_has_torch() {
  static const bool has = python_has({"torch"});
  return has;
}

absl::StatusOr<std::string> run_python(const std::string& script, const std::vector<std::string>& arguments,
                                       const std::filesystem::path& folder, int at_rest_s) {
  const auto timeout_s = static_cast<int>(patient_s(at_rest_s));
  std::string command = "OMP_NUM_THREADS=1 timeout " + std::to_string(timeout_s) + " " + TESSERA_ORACLE_PYTHON + " " +
                        quoted(std::string(TESSERA_ORACLE_FOLDER) + "/" + script);
  for (const std::string& argument : arguments) command += " " + quoted(argument);
  command += " > " + quoted((folder / "stdout").string()) + " 2> " + quoted((folder / "stderr").string());
  const int status = std::system(command.c_str());
  if (status == 0) return read_file(folder / "stdout");
  const std::string said = read_file(folder / "stderr");
  return make_error(ExitCode::kInternal, command + " ended with status " + std::to_string(status) +
                                             " (31744: it took more than " + std::to_string(timeout_s) + " s):\n" +
                                             said.substr(said.size() - std::min<std::size_t>(said.size(), 4000)));
}

}  // namespace tessera::oracle
