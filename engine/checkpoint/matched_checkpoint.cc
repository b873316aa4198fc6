#include "engine/checkpoint/matched_checkpoint.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Contiguity.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/checkpoint/saved_frozen.h"
#include "engine/checkpoint/state_formats.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"
#include "sharding/scalar_type.h"

namespace tessera {
namespace {

// This file works as follows. Matcher compares parameters first, then buffers, then states. It does not stop at the
// first difference: `problems_` collects the reasons for which the checkpoint cannot be loaded, and take() reports them
// in one error (at most kMostProblems). Values and states that cannot be loaded exactly (rounded values, states that
// begin anew or are left out) become lines of MatchedCheckpoint::inexact. match_parameters notes the states that
// parameters need (`needed_`) and that frozen ones keep (`kept_`), and match_states reads both.

constexpr std::size_t kMostProblems = 20;  ///< problems that the error lists

template <class Named>
std::map<std::string, const Named*> by_name(const std::vector<Named>& list) {
  std::map<std::string, const Named*> found;
  for (const Named& each : list) found[each.name] = &each;
  return found;
}

std::string quoted(const std::string& name) { return quoted_text(name, 120); }

std::string sizes_text(const std::vector<std::int64_t>& sizes) { return c10::str(at::IntArrayRef(sizes)); }

/// Compares the Engine's parameters, buffers and states with the checkpoint's, and collects the differences.
class Matcher {
 public:
  Matcher(const StoredStates& states, const Manifest& manifest)
      : states_(states), manifest_(manifest), saved_(by_name(manifest.parameters)) {}

  void match_parameters(const std::vector<std::unique_ptr<Unit>>& units, const NamedTensors& whole) {
    std::vector<std::string> left;
    for (const auto& [name, parameter] : saved_) left.push_back(name);
    for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
      const FlatParameter& parameter = group.parameters[i];
      if (const auto found = saved_.find(parameter.name); found == saved_.end()) {
        missing_.push_back(parameter.name);
      } else {
        std::erase(left, parameter.name);
        match(group, i, *found->second);
      }
    });
    for (const std::string& name : missing_)
      problem("parameter " + quoted(name) + " of the model is not in the checkpoint" + did_you_mean(name, left));
    for (const std::string& name : left)
      problem("parameter " + quoted(name) + " of the checkpoint is not in the model" +
              (whole.contains(name) ? ": /units/ignored leaves it out" : did_you_mean(name, missing_)));
  }

  void match_buffers(const NamedTensors& whole) {
    const auto saved = by_name(manifest_.buffers);
    std::size_t matched = 0;
    for (const auto& item : whole) {
      const at::Tensor& buffer = item.value();
      const auto found = saved.find(item.key());
      if (found == saved.end()) {
        problem("buffer " + quoted(item.key()) + " of the model is not in the checkpoint");
        continue;
      }
      ++matched;
      const std::string word = safetensors_word(buffer.scalar_type(), "buffer " + item.key());
      if (buffer.sizes() != at::IntArrayRef(found->second->shape) || word != found->second->dtype)
        problem(c10::str("buffer ", quoted(item.key()), ": the model wants ", word, " of ", buffer.sizes(),
                         ", the checkpoint has ", found->second->dtype, " of ", sizes_text(found->second->shape)));
    }
    if (matched == saved.size()) return;
    for (const auto& [name, buffer] : saved) {
      if (!whole.contains(name)) problem("buffer " + quoted(name) + " of the checkpoint is not in the model");
    }
  }

  /// REQUIRES: match_parameters ran before; it collects `needed_` and `kept_`.
  void match_states() {
    const std::vector<SavedState>& states = states_.all();
    const auto saved = by_name(manifest_.states);
    std::vector<SavedState> missing, averages;
    for (const SavedState& state : states) {
      const auto found = saved.find(state.name);
      if (found == saved.end() && !needed_.contains(state.name)) {
        matched_.states.push_back(nullptr);  // the state begins anew, since only parameters that were frozen have it
        continue;
      }
      if (found == saved.end()) {
        (state.name == "ema" ? averages : missing).push_back(state);
        continue;
      }
      matched_.states.push_back(found->second);
      if (found->second->format == state.format) continue;
      if (!can_convert(found->second->format, state.format)) {
        problem("the state " + quoted(state.name) + " is " + found->second->format +
                " in the checkpoint, and the Engine wants " + state.format +
                ". [T0090] hint: give /optimizer/state_dtype as in the run that saved it");
      } else if (!is_exact(found->second->format, state.format)) {
        inexact("the state " + quoted(state.name) + " is " + found->second->format +
                " in the checkpoint and was rounded to " + state.format);
      }
    }
    missing_states(missing, "/optimizer/type");
    missing_states(averages, "/ema");
    for (const SavedState& state : manifest_.states) {
      if (std::ranges::find(states, state.name, &SavedState::name) == states.end() && !kept_.contains(state.name))
        inexact("the optimizer has no state " + quoted(state.name) + ", so that of the checkpoint was left out");
    }
    const bool is_noisy = std::ranges::any_of(states, [](const SavedState& state) { return state.format != "fp32"; });
    if (is_noisy && renumbered_ > 0)
      inexact(c10::str("units are others than in the run that was saved, so ", renumbered_,
                       " parameters' states will be rounded with other noise"));
  }

  absl::StatusOr<MatchedCheckpoint> take() {
    if (problems_.empty()) {
      note("begin with states of zeros, since they were frozen", anew_);
      note("were rounded to a narrower type, since they are frozen", rounded_);
      return std::move(matched_);
    }
    const std::size_t more = problems_.size() > kMostProblems ? problems_.size() - kMostProblems : 0;
    problems_.resize(problems_.size() - more);
    return make_error(ExitCode::kCorruptData,
                      "it does not fit the model:\n  " + joined(problems_, "\n  ") +
                          (more > 0 ? c10::str("\n  and ", more, " more") : "") +
                          "\n[T0091] hint: make the model and its optimizer as in the run that saved it (tessera "
                          "checkpoint show lists what it holds), or begin anew with its weights alone");
  }

 private:
  void problem(std::string text) { problems_.push_back(std::move(text)); }
  void missing_states(const std::vector<SavedState>& missing, const char* key) {
    if (missing.empty()) return;
    problem(c10::str("the optimizer keeps ", names_of(missing), " for each parameter, and the checkpoint has ",
                     names_of(manifest_.states), ". [T0089] hint: give ", key, " as in the run that saved it"));
  }
  void inexact(std::string text) { matched_.inexact.push_back(std::move(text)); }
  void note(const std::string& what, const std::vector<std::string>& names) {
    if (!names.empty()) inexact(c10::str(names.size(), " parameters ", what, ": ", clipped(joined(names), 500)));
  }

  static std::string names_of(const std::vector<SavedState>& states) {
    std::vector<std::string> names;
    for (const SavedState& state : states) names.push_back(quoted(state.name));
    return names.empty() ? "none" : joined(names);
  }

  void match(FlatGroup& group, std::size_t i, const SavedParameter& saved) {
    const FlatParameter& parameter = group.parameters[i];
    const std::string who = "parameter " + quoted(parameter.name);
    if (parameter.sizes != saved.shape)
      return problem(who + ": the model wants " + sizes_text(parameter.sizes) + ", the checkpoint has " +
                     sizes_text(saved.shape));
    if (saved_strides(parameter) != saved.strides)
      return problem(who + ": the model has its elements in the order of strides " + sizes_text(parameter.strides) +
                     ", the checkpoint in that of " + (saved.strides.empty() ? "rows" : sizes_text(saved.strides)));
    if (parameter.aliases != saved.aliases)
      return problem(who + ": the model ties it to [" + joined(parameter.aliases) + "], the checkpoint to [" +
                     joined(saved.aliases) + "]");
    check_type(group, who, saved);
    if (group.trainable && saved.keeps_states()) check_states(group, i, who, saved);
    if (group.trainable && !saved.keeps_states()) anew_.push_back(parameter.name);
    if (!group.trainable) note_kept(saved);
    if (group.trainable && (saved.unit != group.unit->index || saved.group != static_cast<std::int64_t>(group.index) ||
                            saved.first_element != group.layout.extent(i).offset))
      ++renumbered_;
    matched_.parameters.push_back({&group, i, &saved});
  }

  /// Notes the states of the checkpoint that a frozen parameter keeps. Perhaps no parameter that trains has these
  /// states.
  void note_kept(const SavedParameter& saved) {
    if (!saved.keeps_states()) return;
    for (const SavedState& state : manifest_.states) {
      if (saved.has_state(state.name) && kept_format(state, saved, states_)) kept_.insert(state.name);
    }
  }

  /// Checks the states of a parameter that trains. REQUIRES: `saved` has states.
  void check_states(const FlatGroup& group, std::size_t i, const std::string& who, const SavedParameter& saved) {
    bool fits = true;
    const auto check = [&](const std::string& name, const std::vector<std::int64_t>& sizes) {
      if (!fits) return;
      needed_.insert(name);
      const bool is_known = std::ranges::find(manifest_.states, name, &SavedState::name) != manifest_.states.end();
      if (!is_known) return;  // match_states reports a state that the whole checkpoint lacks, once
      const bool is_missing = !saved.has_state(name);
      fits = !is_missing && saved.shape_of(name) == sizes;
      if (is_missing) {
        problem(who + ": the optimizer keeps " + quoted(name) + " for it, and the checkpoint has " +
                joined(*saved.states) +
                ". [T0092] hint: give /optimizer/groups as in the run that saved it; they say which rule updates it");
      } else if (!fits) {
        problem(who + ": the optimizer keeps " + sizes_text(sizes) + " of " + quoted(name) +
                " for it, and the checkpoint has " + sizes_text(saved.shape_of(name)) +
                ". [T0093] hint: give /optimizer, with its groups, as in the run that saved it");
      }
    };
    for (const std::size_t place : states_.of(group)) check(states_.all()[place].name, saved.shape);
    for_each_tensor_state(group, i, [&](const TensorState& state, Extent) { check(state.name, state.sizes); });
  }

  void check_type(const FlatGroup& group, const std::string& who, const SavedParameter& saved) {
    const std::string wanted = safetensors_word(group.dtype), got = saved.trains ? "F32" : saved.dtype;
    if (wanted == got || (group.trainable && got == "F32")) return;
    const auto is_float = [](const std::string& word) { return word == "F32" || word == "BF16" || word == "F16"; };
    if (!is_float(wanted) || !is_float(got))
      return problem(who + ": the model wants the type " + wanted + ", the checkpoint has " + got);
    const bool widens = group.trainable || saved.has_master() || wanted == "F32";
    if (!widens) rounded_.push_back(saved.name);
  }

  const StoredStates& states_;
  const Manifest& manifest_;
  const std::map<std::string, const SavedParameter*> saved_;
  MatchedCheckpoint matched_;
  std::vector<std::string> problems_, missing_, anew_, rounded_;
  std::set<std::string> needed_;  ///< names of the states without which some parameter cannot continue training
  std::set<std::string> kept_;    ///< names of states that some frozen parameter keeps
  std::int64_t renumbered_ = 0;
};

}  // namespace

std::vector<std::int64_t> saved_strides(const FlatParameter& parameter) {
  const auto rows = c10::contiguous_strides(parameter.sizes);
  return at::IntArrayRef(rows) == at::IntArrayRef(parameter.strides) ? std::vector<std::int64_t>() : parameter.strides;
}

absl::StatusOr<MatchedCheckpoint> match_checkpoint(const std::vector<std::unique_ptr<Unit>>& units,
                                                   const NamedTensors& whole, const StoredStates& states,
                                                   const Manifest& manifest) {
  Matcher matcher(states, manifest);
  matcher.match_parameters(units, whole);
  matcher.match_buffers(whole);
  matcher.match_states();
  return matcher.take();
}

}  // namespace tessera
