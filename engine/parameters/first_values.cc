#include "engine/parameters/first_values.h"

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <algorithm>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "engine/init/piece_maker.h"
#include "engine/memory/kept_group.h"
#include "engine/memory/master_weights.h"
#include "runtime/base/process/on_threads.h"
#include "runtime/base/rank_name.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "sharding/scalar_type.h"
#include "sharding/unrecorded.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// FirstValues works as follows. The constructor lists how this rank would make each parameter (Source), and ranks
// compare digests of these lists (Summary). If digests differ, ranks compare parameter by parameter
// (`compare_recipes`). `load` then fills one unit. Each rank makes its parts of the parameters that have a PieceMaker,
// on several threads (`make_parts`). Rank 0 sends the other parameters in chunks (`send`). At last FirstValues::load
// makes the module's tensors views of the flat buffers.

constexpr std::int64_t kPiece = 1 << 16;  ///< number of elements that are made at a time: they stay in a core's cache
constexpr std::int64_t kSent = 1 << 22;   ///< number of elements that are sent at a time
constexpr std::int64_t kTask = 1 << 22;   ///< number of elements that one thread makes before it takes the next task

std::uint64_t digest(const std::string& text) { return XXH3_64bits(text.data(), text.size()); }

/// The way in which this rank would make a parameter.
struct Source {
  FlatParameter* parameter = nullptr;
  std::optional<PieceMaker> maker;
  std::uint64_t recipe = 0;  ///< digest of the parameter's operators; 0 if the parameter is real on this rank
};

std::string describe(const FlatParameter& parameter) {
  return parameter.name + "\n" + (is_deferred(parameter.tensor) ? recipe_of(parameter.tensor) : "real\n");
}

std::vector<Source> sources_of(const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<Source> sources;
  for_each_parameter(units, [&](FlatGroup& group, std::size_t i) {
    FlatParameter& parameter = group.parameters[i];
    Source& source = sources.emplace_back(Source{&parameter, std::nullopt, 0});
    if (!is_deferred(parameter.tensor)) return;
    source.recipe = digest(describe(parameter)) | 1;
    // Pieces are cut in the order of the tensor's memory. So the flat buffer must have the same order.
    if (parameter.tensor.strides() == at::IntArrayRef(parameter.strides)) {
      source.maker = PieceMaker::of(parameter.tensor);
    }
  });
  return sources;
}

/// The digests that ranks first send to each other. Usually all members are equal on all ranks, which ends the
/// comparison.
struct Summary {
  std::uint64_t count = 0;       ///< number of parameters
  std::uint64_t recipes = 0;     ///< digest of the recipes of all parameters (Source::recipe)
  std::uint64_t states = 0;      ///< digest of the generators' states from which parameters are made
  std::uint64_t arithmetic = 0;  ///< digest of numbers that LibTorch draws from a known state
};

Summary summary_of(const std::vector<Source>& sources) {
  Summary summary{sources.size(), 0, 0, digest_of_arithmetic()};
  std::vector<std::uint64_t> recipes, states;
  for (const Source& source : sources) {
    recipes.push_back(source.recipe);
    if (!source.maker) continue;
    const std::vector<std::byte> bytes = source.maker->states();
    states.push_back(XXH3_64bits(bytes.data(), bytes.size()));
  }
  summary.recipes = XXH3_64bits(recipes.data(), recipes.size() * sizeof(std::uint64_t));
  summary.states = XXH3_64bits(states.data(), states.size() * sizeof(std::uint64_t));
  return summary;
}

}  // namespace

/// Lets ranks agree on where each parameter gets its values from, and fills parameters with them.
class FirstValues::Sources {
 public:
  Sources(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) : control_(control), kept_(control) {
    std::vector<Source> sources = sources_of(units);
    if (control_.size() > 1) agree(sources);
    for (Source& source : sources) {
      if (source.maker) makers_.emplace(source.parameter, std::move(*source.maker));
    }
  }

  void load(FlatGroup& group) {
    if (sends_states_) take_states(group);
    make_parts(group);
    for (std::size_t i = 0; i < group.parameters.size();) {
      std::size_t end = i;
      while (end < group.parameters.size() && !makers_.count(&group.parameters[end])) ++end;
      if (end > i) send(group, i, end);
      i = std::max(end, i + 1);
    }
    if (group.parameters_below.carrier) write_padding(group);
  }

 private:
  void agree(std::vector<Source>& sources);
  void compare_recipes(std::vector<Source>& sources);
  [[noreturn]] void throw_difference(const FlatParameter& parameter);
  [[noreturn]] void throw_other_parameters(const std::vector<Source>& sources);
  std::string own_name() const { return rank_name(control_.rank(), control_.size()); }
  void take_states(FlatGroup& group);
  void make_parts(FlatGroup& group);
  void make_part(FlatGroup& group, std::size_t i, Extent range, PieceMaker maker);
  void send(FlatGroup& group, std::size_t begin, std::size_t end);
  static void write_padding(FlatGroup& group);
  at::Tensor in_flat_order(const FlatParameter& parameter);

  Collectives& control_;
  KeptValues kept_;
  /// makers of the parameters that every rank makes itself
  std::unordered_map<const FlatParameter*, PieceMaker> makers_;
  bool sends_states_ = false;
};

void FirstValues::Sources::agree(std::vector<Source>& sources) {
  const Summary own = summary_of(sources);
  std::vector<Summary> all(static_cast<std::size_t>(control_.size()), own);
  throw_if_error(control_.all_gather("first values", &own, all.data(), sizeof own).wait());
  const auto all_have = [&](std::uint64_t Summary::*member) {
    return std::all_of(all.begin(), all.end(), [&](const Summary& each) { return each.*member == all[0].*member; });
  };
  if (!all_have(&Summary::count)) throw_other_parameters(sources);
  if (!all_have(&Summary::recipes)) compare_recipes(sources);
  if (!all_have(&Summary::arithmetic)) {
    for (Source& source : sources) source.maker.reset();
  }
  sends_states_ = !all_have(&Summary::states);
}

/// Removes the maker of each parameter that is real on some rank, so that rank 0 sends its values. All other parameters
/// must have the recipe of rank 0 on all ranks; otherwise all ranks throw.
void FirstValues::Sources::compare_recipes(std::vector<Source>& sources) {
  const std::size_t count = sources.size();
  std::vector<std::uint64_t> recipes;
  for (const Source& source : sources) recipes.push_back(source.recipe);
  const std::vector<std::uint64_t> own = recipes;
  throw_if_error(control_.broadcast("first values", recipes.data(), count * sizeof(std::uint64_t), 0).wait());
  // [i]: number of ranks that have real values of parameter i. [count + i]: number of ranks that would make it in
  // another way than rank 0.
  std::vector<float> ranks(2 * count, 0.0F);
  for (std::size_t i = 0; i < count; ++i) {
    ranks[i] = own[i] == 0 ? 1.0F : 0.0F;
    ranks[count + i] = own[i] != recipes[i] ? 1.0F : 0.0F;
  }
  throw_if_error(control_.all_reduce("first values", ranks.data(), DType::kF32, ranks.data(), ranks.size()).wait());
  for (std::size_t i = 0; i < count; ++i) {
    if (ranks[i] > 0) {
      sources[i].maker.reset();
    } else if (ranks[count + i] > 0) {
      throw_difference(*sources[i].parameter);
    }
  }
}

namespace {

std::string line_of(const std::string& text, std::size_t number) {
  std::size_t begin = 0;
  for (; number > 0 && begin < text.size(); --number) begin = std::min(text.find('\n', begin), text.size() - 1) + 1;
  return text.substr(begin, text.find('\n', begin) - begin);
}

}  // namespace

void FirstValues::Sources::throw_difference(const FlatParameter& parameter) {
  const auto texts = value_or_throw(gather_strings(control_, "first values", describe(parameter)));
  const auto other =
      std::find_if(texts.begin(), texts.end(), [&](const std::string& text) { return text != texts[0]; });
  if (other == texts.end()) {
    throw Error(ExitCode::kInternal,
                own_name() + ": digests of parameter " + parameter.name + " differ, but not how it is made");
  }
  std::size_t line = 0;
  while (line_of(texts[0], line) == line_of(*other, line)) ++line;
  const auto said = [&](const std::string& text) {
    const std::string words = line_of(text, line);
    return words.empty() ? std::string("nothing more") : "\"" + words + "\"";
  };
  throw Error(ExitCode::kUsage,
              own_name() + ": Engine: ranks do not make the same module: " +
                  (line == 0 ? "parameter " + parameter.name
                             : "operator " + std::to_string(line) + " of parameter " + parameter.name) +
                  " is " + said(texts[0]) + " on rank 0, and " + said(*other) + " on rank " +
                  std::to_string(other - texts.begin()) +
                  ". [T0162] hint: construct the module alike on every rank; seeds may differ, operators may not");
}

void FirstValues::Sources::throw_other_parameters(const std::vector<Source>& sources) {
  std::string names;
  for (const Source& source : sources) names += source.parameter->name + "\n";
  const auto texts = value_or_throw(gather_strings(control_, "first values", names));
  const auto other =
      std::find_if(texts.begin(), texts.end(), [&](const std::string& text) { return text != texts[0]; });
  const std::string& theirs = other == texts.end() ? texts[0] : *other;
  std::size_t line = 0;
  while (line < sources.size() && line_of(texts[0], line) == line_of(theirs, line)) ++line;
  const auto said = [&](const std::string& text) {
    const std::string words = line_of(text, line);
    return words.empty() ? std::string("no more") : words;
  };
  throw Error(ExitCode::kUsage, own_name() + ": Engine: ranks do not have the same parameters: parameter " +
                                    std::to_string(line + 1) + " is " + said(texts[0]) + " on rank 0, and " +
                                    said(theirs) + " on rank " + std::to_string(other - texts.begin()) +
                                    ". [T0163] hint: construct the module alike on every rank");
}

void FirstValues::Sources::take_states(FlatGroup& group) {
  for (const FlatParameter& parameter : group.parameters) {
    const auto maker = makers_.find(&parameter);
    if (maker == makers_.end()) continue;
    std::vector<std::byte> states = maker->second.states();
    throw_if_error(control_.broadcast(parameter.name, states.data(), states.size(), 0).wait());
    maker->second.set_states(states);
  }
}

/// Makes this rank's parts of the parameters that have a maker, on several threads.
void FirstValues::Sources::make_parts(FlatGroup& group) {
  struct Task {
    std::size_t parameter;
    Extent range;  ///< the range of the parameter's elements
  };
  std::vector<Task> tasks;
  std::int64_t numel = 0;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    if (!makers_.count(&group.parameters[i])) continue;
    const Extent place = group.layout.extent(i), own = intersect(place, group.parameter_part);
    const std::int64_t end = own.end() - place.offset;
    for (std::int64_t at = own.offset - place.offset; own.numel > 0 && at < end;) {
      const std::int64_t next = std::min(end, (at / kTask + 1) * kTask);
      tasks.push_back({i, {at, next - at}});
      at = next;
    }
    numel += own.numel;
  }
  // Records must be written in order, each once, so one thread makes the elements that lie in records.
  const bool in_records = group.parameters_below.carrier || group.states_below.carrier;
  const bool several = !in_records && numel >= kTask;
  // Each thread has its own current stream. All threads use the stream of this thread, since the memory was cleared on
  // that stream.
  std::optional<c10::Stream> stream;
  if (!group.device.is_cpu()) stream = c10::impl::VirtualGuardImpl(group.device.type()).getStream(group.device);
  on_threads(tasks.size(), several ? static_cast<std::size_t>(at::get_num_threads()) : 1, [&](std::size_t t) {
    const c10::OptionalStreamGuard on_stream(stream);
    const PieceMaker& maker = makers_.at(&group.parameters[tasks[t].parameter]);
    make_part(group, tasks[t].parameter, tasks[t].range, maker.another());
  });
}

void FirstValues::Sources::make_part(FlatGroup& group, std::size_t i, Extent range, PieceMaker maker) {
  const Unrecorded unrecorded;
  const std::int64_t offset = group.layout.extent(i).offset;
  for (std::int64_t at = range.offset; at < range.end();) {
    const std::int64_t next = std::min(range.end(), (at / kPiece + 1) * kPiece);
    const at::Tensor piece = maker.make(at, next - at);
    const at::Tensor values = piece.to(flat_type_of(group));
    write_values(group, values, {offset + at, next - at});
    at = next;
  }
}

/// Returns the parameter's values [numel] in the order of the flat buffer, on the CPU. It is collective if an earlier
/// Engine kept the values.
at::Tensor FirstValues::Sources::in_flat_order(const FlatParameter& parameter) {
  at::Tensor values = materialize({kept_.value_of(parameter.tensor.detach())})[0].cpu();
  if (values.strides() != at::IntArrayRef(parameter.strides)) {
    values = at::empty_strided(parameter.sizes, parameter.strides, values.options()).copy_(values);
  }
  return values.as_strided({parameter.numel}, {1}, values.storage_offset());
}

/// Sends rank 0's values of parameters [begin, end), which follow each other in the flat buffer, to all ranks.
void FirstValues::Sources::send(FlatGroup& group, std::size_t begin, std::size_t end) {
  const Extent first = group.layout.extent(begin), last = group.layout.extent(end - 1);
  const at::ScalarType dtype = flat_type_of(group);
  const bool is_root = control_.rank() == 0;
  const auto has_part = [&](std::size_t i) { return is_root || kept_of(group.parameters[i].tensor) != nullptr; };
  std::size_t next = begin;  // the first parameter that is not sent completely yet
  at::Tensor values;         // values of parameter `next`, if this rank has some of them
  for (std::int64_t at = first.offset; at < last.end(); at += kSent) {
    const Extent chunk{at, std::min(kSent, last.end() - at)};
    const at::Tensor buffer = at::zeros({chunk.numel}, dtype);
    for (; next < end; ++next, values = at::Tensor()) {
      const Extent place = group.layout.extent(next), here = intersect(place, chunk);
      if (here.numel > 0 && has_part(next)) {
        if (!values.defined()) values = in_flat_order(group.parameters[next]);
        buffer.narrow(0, here.offset - chunk.offset, here.numel)
            .copy_(values.narrow(0, here.offset - place.offset, here.numel));
      }
      if (place.end() > chunk.end()) break;
    }
    throw_if_error(control_.broadcast(group.parameters[begin].name, buffer.data_ptr(), buffer.nbytes(), 0).wait());
    write_values(group, buffer, chunk);
  }
}

/// Writes the padding behind the last parameter. A record that has only padding is written too, so that a gather reads
/// as many bytes on every rank as the plan says.
void FirstValues::Sources::write_padding(FlatGroup& group) {
  const std::int64_t numel = group.layout.numel();
  const std::int64_t end = group.layout.extent(group.parameters.size() - 1).end();
  const Extent padding = intersect(group.parameter_part, {end, numel - end});
  if (padding.numel > 0) write_values(group, at::zeros({padding.numel}, flat_type_of(group)), padding);
}

FirstValues::FirstValues(const std::vector<std::unique_ptr<Unit>>& units, Collectives& control) {
  const Unrecorded unrecorded;
  sources_ = std::make_unique<Sources>(units, control);
}

FirstValues::~FirstValues() = default;

void FirstValues::load(Unit& unit) {
  const Unrecorded unrecorded;
  const bool replicated = unit.groups.empty() || unit.groups[0]->full != nullptr;
  for (auto& group : unit.groups) {
    sources_->load(*group);
    if (replicated) group->attach(group->full);
    for (std::size_t i = 0; i < group->parameters.size(); ++i) {
      rebase(group->parameters[i], *group, group->layout.extent(i).offset);
    }
    if (!replicated) group->attach(nullptr);
  }
  if (replicated) unit.become(Unit::State::kGathered);
}

}  // namespace tessera
