// tessera tokenize: turns text into tokens on disk.

#include <cstdio>
#include <string>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/data/text_files.h"
#include "runtime/data/token_writers.h"
#include "workshop/app/commands.h"
#include "workshop/app/exit_code_after.h"
#include "workshop/app/output_files.h"
#include "workshop/app/text/text_tokenizer.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMostTokenInU16 = 65536;

absl::Status tokenize(const TokenizeCommand& command) {
  TESSERA_ASSIGN_OR_RETURN(const Tokenizer tokenizer, Tokenizer::read(command.tokenizer));
  std::vector<Tokenizer::Id> end;
  if (!command.end.empty()) {
    const std::optional<Tokenizer::Id> id = tokenizer.id_of(command.end);
    if (!id)
      return make_error(ExitCode::kUsage,
                        "tokenize: --end " + command.end + " is no token of " + command.tokenizer +
                            ". [T0047] hint: take one of its \"added_tokens\", such as <|endoftext|>");
    end.push_back(*id);
  }
  TESSERA_RETURN_IF_ERROR(
      check_outputs({{"--out", command.out + ".idx"}, {"--out", command.out + ".bin"}},
                    {{"--tokenizer", command.tokenizer}, {"--data", command.data, command.extensions}},
                    command.overwrite ? Existing::kReplaced : Existing::kKept));
  TESSERA_ASSIGN_OR_RETURN(const std::vector<MappedFile> files, open_text_files(command.data, command.extensions));
  std::vector<std::vector<std::int64_t>> documents;
  std::int64_t bytes = 0, tokens = 0;
  for (const MappedFile& file : files) {
    std::vector<Tokenizer::Id> ids;
    const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.size());
    TESSERA_ASSIGN_OR_RETURN(const std::size_t replaced, tokenizer.encode(text, /*add_special=*/true, ids));
    if (replaced > 0)
      log_warning(file.path().string() + ": " + std::to_string(replaced) +
                  " parts are no UTF-8, and are read as U+FFFD");
    ids.insert(ids.end(), end.begin(), end.end());
    documents.emplace_back(ids.begin(), ids.end());
    bytes += static_cast<std::int64_t>(file.size());
    tokens += static_cast<std::int64_t>(ids.size());
  }
  TESSERA_RETURN_IF_ERROR(write_megatron(
      command.out, documents, tokenizer.vocab_size() <= kMostTokenInU16 ? TokenType::kU16 : TokenType::kI32));
  std::printf("%s.idx, %s.bin: %lld tokens of %lld bytes in %zu files\n", command.out.c_str(), command.out.c_str(),
              static_cast<long long>(tokens), static_cast<long long>(bytes), files.size());
  return absl::OkStatus();
}

}  // namespace

int run_tokenize(const TokenizeCommand& command) { return exit_code_after(tokenize(command)); }

}  // namespace tessera::app
