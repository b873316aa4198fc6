#include "runtime/base/seeded_fault.h"

#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tessera/exit_code.h"

namespace tessera {
namespace {

struct Name {
  SeededFault which;
  std::string_view text;
};

constexpr Name kNames[] = {
    {SeededFault::kCrcWithoutLastByte, "crc_without_last_byte"},
    {SeededFault::kTwoReplicasOfFullShard, "two_replicas_of_full_shard"},
    {SeededFault::kSumSplitInTheMiddle, "sum_split_in_the_middle"},
    {SeededFault::kRemainderOfOwnHost, "remainder_of_own_host"},
    {SeededFault::kLaterBlockReplaces, "later_block_replaces"},
    {SeededFault::kSliceEndsAtALine, "slice_ends_at_a_line"},
    {SeededFault::kEpochsAlike, "epochs_alike"},
    {SeededFault::kInheritedRankWins, "inherited_rank_wins"},
    {SeededFault::kNoLastGap, "no_last_gap"},
    {SeededFault::kPartSentToItself, "part_sent_to_itself"},
    {SeededFault::kFirstGradientNotCleared, "first_gradient_not_cleared"},
    {SeededFault::kBiasCorrectionOneAhead, "bias_correction_one_ahead"},
    {SeededFault::kRecordWrittenOnce, "record_written_once"},
    {SeededFault::kPortionsAlike, "portions_alike"},
    {SeededFault::kLastRankUnheard, "last_rank_unheard"},
    {SeededFault::kMastersNotWritten, "masters_not_written"},
    {SeededFault::kJumpOneWordFar, "jump_one_word_far"},
    {SeededFault::kBiasedRunningVariance, "biased_running_variance"},
    {SeededFault::kTopKOneMore, "top_k_one_more"},
    {SeededFault::kLastAnswerUnread, "last_answer_unread"},
};

SeededFault read_environment() {
  const char* const text = std::getenv("TESSERA_SEEDED_FAULT");
  if (text == nullptr || *text == '\0') return SeededFault::kNone;
  for (const Name& name : kNames) {
    if (name.text == text) return name.which;
  }
  std::fprintf(stderr,
               "TESSERA_SEEDED_FAULT: there is no fault \"%s\". [T0425] hint: scripts/seeded_faults --list names all "
               "of them; unset the variable where no fault is wanted\n",
               text);
  std::_Exit(static_cast<int>(ExitCode::kConfig));
}

}  // namespace

SeededFault chosen_seeded_fault() {
  static const SeededFault chosen = read_environment();
  return chosen;
}

}  // namespace tessera
