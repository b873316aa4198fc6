#include "engine/checkpoint/state_writer.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "checkpoint/saved_checkpoint.h"
#include "engine/checkpoint/tensor_bytes.h"
#include "engine/memory/state_views.h"
#include "optim/arithmetic/rounding.h"
#include "runtime/base/status.h"
#include "sharding/layout/written_part.h"

namespace tessera {
namespace {

constexpr std::int64_t kJoinedAtOnce = 16384;
constexpr std::int64_t kFetchedBytes = 1 << 19;  ///< number of bytes that are passed on, or fetched from a device, at
                                                 ///< once

/// Calls `portions(append)`, which calls `append` with one portion after the other. Passes each portion to `sink`.
/// After the first failure, no portion is passed on.
template <class Sink, class Portions>
absl::Status append_portions(const Sink& sink, const Portions& portions) {
  absl::Status status;
  portions([&](const void* data, std::int64_t bytes) {
    if (status.ok()) status = sink({static_cast<const std::byte*>(data), static_cast<std::size_t>(bytes)});
  });
  return status;
}

/// Passes `bytes` to `sink` in portions.
template <class Sink>
absl::Status append_bytes(std::span<const std::byte> bytes, const Sink& sink) {
  for (std::size_t begin = 0; begin < bytes.size(); begin += kFetchedBytes)
    TESSERA_RETURN_IF_ERROR(sink(bytes.subspan(begin, std::min<std::size_t>(kFetchedBytes, bytes.size() - begin))));
  return absl::OkStatus();
}

/// Joins split masters (the bf16 parameters and the low halves) to fp32 numbers.
template <class Append>
void append_joined(std::span<const std::uint16_t> high, std::span<const std::int16_t> low, const Append& append) {
  std::array<float, kJoinedAtOnce> joined;
  const auto numel = static_cast<std::int64_t>(high.size());
  for (std::int64_t begin = 0; begin < numel; begin += kJoinedAtOnce) {
    const std::int64_t count = std::min(kJoinedAtOnce, numel - begin);
    for (std::int64_t i = 0; i < count; ++i) {
      const auto rest = static_cast<std::uint32_t>(static_cast<std::int32_t>(low[begin + i]));
      joined[i] = std::bit_cast<float>(join_split(std::uint32_t{high[begin + i]}, rest));
    }
    append(joined.data(), count * 4);
  }
}

template <class Append>
void append_split(const StateView& view, const Append& append) {
  constexpr std::int64_t kElements = kFetchedBytes / 4;
  for (std::int64_t begin = 0; begin < view.run.numel; begin += kElements) {
    const std::int64_t count = std::min(kElements, view.run.numel - begin);
    const HostView high(view.parameter + begin * 2, count * 2, view.parameter_place, HostView::kFetch);
    const HostView low(view.low + begin, count * 2, view.masters_place, HostView::kFetch);
    append_joined({reinterpret_cast<const std::uint16_t*>(high.data()), static_cast<std::size_t>(count)},
                  {reinterpret_cast<const std::int16_t*>(low.data()), static_cast<std::size_t>(count)}, append);
  }
}

template <class Sink>
absl::Status append_masters(const FlatGroup& group, Extent run, const Sink& sink) {
  const bool is_parameter = group.dtype == DType::kF32, is_split = group.master_kind == MasterKind::kSplitBF16;
  const StateKind kind = is_parameter ? StateKind::kParameters
                         : is_split   ? StateKind::kAll
                                      : StateKind::kMastersAndStates;
  return append_portions(sink, [&](const auto& append) {
    for_each_state(group, kind, run, StateUse::kRead, [&](const StateView& view) {
      if (!is_parameter && is_split) return append_split(view, append);
      view_in_portions(is_parameter ? static_cast<void*>(view.parameter) : view.master, view.run.numel * 4,
                       is_parameter ? view.parameter_place : view.masters_place, append);
    });
  });
}

template <class Sink>
absl::Status append_values(const FlatGroup& group, Extent run, const Sink& sink) {
  return append_portions(sink, [&](const auto& append) {
    for_each_state(group, StateKind::kParameters, run, StateUse::kRead, [&](const StateView& view) {
      view_in_portions(view.parameter, view.run.numel * group.element_bytes(), view.parameter_place, append);
    });
  });
}

template <class Sink>
absl::Status append_state(const FlatGroup& group, std::size_t state, bool scales, Extent run, const Sink& sink) {
  return append_portions(sink, [&](const auto& append) {
    for_each_state(group, StateKind::kMastersAndStates, run, StateUse::kRead, [&](const StateView& view) {
      const StateBytes bytes = bytes_of_state(group, state, view.run.numel);
      void* const memory = scales ? static_cast<void*>(view.state[state].scales) : view.state[state].data;
      view_in_portions(memory, scales ? bytes.scales : bytes.data, view.states_place, append);
    });
  });
}

template <class Sink>
absl::Status append_tensor_state(const FlatGroup& group, Extent run, const Sink& sink) {
  return append_portions(sink, [&](const auto& append) {
    visit_tensor_states(group, StateUse::kRead, [&](const TensorStatesView& view) {
      view_in_portions(view.at(run.offset), run.numel * 4, view.place, append);
    });
  });
}

}  // namespace

StateWriter::StateWriter(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                         const MeshPosition& mesh, const StoredStates& states) {
  const Placement& placement = plan.placement();
  for_each_parameter(units, [&](const FlatGroup& group, std::size_t i) {
    const AxisPlacement axes = group.trainable ? placement.optimizer : placement.parameters;
    const Extent run = intersect(group.layout.extent(i), written_part(axes, mesh, group.layout.numel()));
    if (run.numel > 0) add_run(group, i, run, states);
    add_tensor_states(group, i, written_part(axes, mesh, group.tensor_states.numel()));
  });
}

/// `written`: the part of the group's buffer of tensor states that this rank writes.
void StateWriter::add_tensor_states(const FlatGroup& group, std::size_t parameter, Extent written) {
  for_each_tensor_state(group, parameter, [&](const TensorState& state, Extent place) {
    const Extent run = intersect(place, written);
    if (run.numel <= 0) return;
    sources_.push_back({{state.name, group.parameters[parameter].name, "F32", run.offset - place.offset, run.numel},
                        [&group, run](const Sink& sink) { return append_tensor_state(group, run, sink); }});
  });
}

void StateWriter::add_run(const FlatGroup& group, std::size_t parameter, Extent run, const StoredStates& states) {
  const std::string& name = group.parameters[parameter].name;
  const std::int64_t offset = run.offset - group.layout.extent(parameter).offset;
  if (!group.trainable) {
    sources_.push_back({{kValue, name, safetensors_word(group.dtype), offset, run.numel},
                        [&group, run](const Sink& sink) { return append_values(group, run, sink); }});
    return;
  }
  sources_.push_back({{kMaster, name, "F32", offset, run.numel},
                      [&group, run](const Sink& sink) { return append_masters(group, run, sink); }});
  const std::span<const std::size_t> places = states.of(group);
  for (std::size_t state = 0; state < places.size(); ++state) {
    const SavedState& saved = states.all()[places[state]];
    const std::string& what = saved.name;
    sources_.push_back({{what, name, dtype_of_state(saved), offset, run.numel}, [&group, run, state](const Sink& sink) {
                          return append_state(group, state, false, run, sink);
                        }});
    if (saved.format != "8bit") continue;
    sources_.push_back(
        {{what + kScales, name, "F32", offset / kStateBlock, (run.numel + kStateBlock - 1) / kStateBlock},
         [&group, run, state](const Sink& sink) { return append_state(group, state, true, run, sink); }});
  }
}

void StateWriter::add(const std::string& what, const std::string& name, const at::Tensor& host) {
  if (host.numel() == 0) return;
  sources_.push_back({{what, name, safetensors_word(host.scalar_type(), what + " " + name), 0, host.numel()},
                      [host](const Sink& sink) { return append_bytes(bytes_of(host), sink); },
                      /*is_held=*/true});
}

void StateWriter::add(const std::string& what, const std::string& name, std::int64_t first,
                      std::span<const float> values, MemoryPlace place) {
  sources_.push_back(
      {{what, name, "F32", first, static_cast<std::int64_t>(values.size())}, [values, place](const Sink& sink) {
         return append_portions(sink, [&](const auto& append) {
           view_in_portions(values.data(), static_cast<std::int64_t>(values.size_bytes()), place, append);
         });
       }});
}

void StateWriter::add(const std::string& what, const std::string& name, const std::string& dtype, std::int64_t first,
                      std::shared_ptr<const std::vector<std::byte>> bytes) {
  const std::int64_t numel = static_cast<std::int64_t>(bytes->size()) / element_bytes(dtype);
  if (numel == 0) return;
  sources_.push_back({{what, name, dtype, first, numel},
                      [bytes = std::move(bytes)](const Sink& sink) { return append_bytes(*bytes, sink); },
                      /*is_held=*/true});
}

absl::Status StateWriter::hold(std::span<std::byte> room) {
  for (Source& source : sources_) {
    if (source.is_held) continue;
    const auto bytes = static_cast<std::size_t>(source.piece.bytes());
    std::size_t copied = 0;
    TESSERA_RETURN_IF_ERROR(source.read([&](std::span<const std::byte> data) {
      if (data.size() > std::min(room.size(), bytes) - copied)
        return make_error(ExitCode::kInternal, c10::str("the copy of ", source.piece.what, " ", source.piece.name,
                                                        " needs more than the ", room.size(), " bytes left for it"));
      std::memcpy(room.data() + copied, data.data(), data.size());  // std::copy copies byte by byte at -O2
      copied += data.size();
      return absl::OkStatus();
    }));
    source.read = [held = std::span<const std::byte>(room.first(copied))](const Sink& sink) {
      return append_bytes(held, sink);
    };
    source.is_held = true;
    room = room.subspan(copied);
  }
  return absl::OkStatus();
}

std::int64_t StateWriter::bytes() const {
  std::int64_t bytes = 0;
  for (const Source& source : sources_) bytes += source.piece.bytes();
  return bytes;
}

absl::StatusOr<SavedFile> StateWriter::write(const std::string& folder, const std::string& name, const std::string& who,
                                             const std::function<absl::Status(std::size_t bytes)>& wrote) {
  ShardHeader header;
  for (const Source& source : sources_) header.pieces.push_back(source.piece);
  place_pieces(header.pieces);
  std::ranges::stable_sort(sources_, std::ranges::greater(),
                           [](const Source& source) { return element_bytes(source.piece.dtype); });
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<ShardWriter> writer, ShardWriter::create(folder, name, header, who));
  const auto sink = [&](std::span<const std::byte> data) {
    TESSERA_RETURN_IF_ERROR(wrote(data.size()));
    return writer->append(data);
  };
  for (const Source& source : sources_) TESSERA_RETURN_IF_ERROR(source.read(sink));
  return writer->finish();
}

}  // namespace tessera
