// tessera import-config: a configuration of DeepSpeed, Accelerate or FSDP -> a strategy file.

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>

#include "app/commands.h"
#include "app/exit_code_after.h"
#include "app/import/translate.h"
#include "app/output_files.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "runtime/base/text_table.h"

namespace tessera::app {
namespace {

constexpr char kKind[] = "configuration";
constexpr std::size_t kMostNamed = 20;  // refused keys that the last line names

std::string fate_text(const KeyFate& key) {
  switch (key.fate) {
    case Fate::kMapped:
      return key.text;
    case Fate::kIgnored:
      return "ignored: " + key.text;
    case Fate::kRefused:
      break;
  }
  return "REFUSED: " + key.text;
}

std::string report_of(const TranslatedConfig& config, const std::string& name) {
  std::string text = name + " is " + config.title + "\n\n";
  TextTable keys({{"key"}, {"value"}, {"what became of it"}});
  for (const KeyFate& key : config.keys) keys.add_row({key.path, key.value, fate_text(key)});
  text += keys.to_string() + "\n";
  if (!config.implied.empty()) {
    TextTable implied({{"also set, as the file leaves it to a default"}, {"why"}});
    for (const ImpliedSetting& each : config.implied)
      implied.add_row({setting_text(each.pointer, each.value), each.why});
    text += implied.to_string() + "\n";
  }
  for (const std::string& note : config.notes) text += "note: " + note + "\n";
  return text + "keys: " + std::to_string(config.count(Fate::kMapped)) + " mapped, " +
         std::to_string(config.count(Fate::kIgnored)) + " ignored, " + std::to_string(config.count(Fate::kRefused)) +
         " refused\n";
}

// "a, b and 3 more".
std::string refused_names(const TranslatedConfig& config) {
  const std::size_t shown = std::min(config.refused.size(), kMostNamed);
  const std::string names =
      joined({config.refused.begin(), config.refused.begin() + static_cast<std::ptrdiff_t>(shown)});
  const std::size_t more = config.refused.size() - shown;
  return more == 0 ? names : names + " and " + std::to_string(more) + " more";
}

absl::StatusOr<std::string> read_configuration(const std::string& file) {
  absl::StatusOr<std::string> text = read_input_file(file, kKind, kMostConfigBytes);
  if (text.ok() || message_of(text.status()).find("hint:") != std::string::npos) return text;
  return make_error(exit_code_of(text.status()), message_of(text.status()) +
                                                     ". hint: name a configuration of DeepSpeed, Accelerate or FSDP "
                                                     "(docs/import-config.md)");
}

absl::Status import_config(const ImportConfigCommand& command) {
  const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
  TESSERA_ASSIGN_OR_RETURN(const std::string text, read_configuration(command.file));
  TESSERA_RETURN_IF_ERROR(check_outputs({{"--out", command.out}}, {{"the configuration", command.file}}, existing));
  TESSERA_ASSIGN_OR_RETURN(const TranslatedConfig config, translate_config(text, command.file, command.format));
  std::fputs(report_of(config, command.file).c_str(), stderr);
  const std::string refused = refused_names(config);
  if (!config.refused.empty() && !command.skip_refused)
    return make_error(ExitCode::kConfig,
                      command.file + ": no strategy is written, since keys are refused: " + refused +
                          ". hint: change them as the table says, or leave them out with --skip-refused");
  if (!config.refused.empty()) std::fprintf(stderr, "left out, since they are refused: %s\n", refused.c_str());
  if (config.strategy.empty())
    return make_error(
        ExitCode::kConfig,
        command.file +
            ": without the refused keys the strategy would contradict itself. hint: change them as the table says");
  if (!command.out.empty()) return write_output(command.out, config.strategy, existing, "import-config");
  std::fputs(config.strategy.c_str(), stdout);
  return absl::OkStatus();
}

}  // namespace

int run_import_config(const ImportConfigCommand& command) { return exit_code_after(import_config(command)); }

}  // namespace tessera::app
