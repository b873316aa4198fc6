#include "runtime/comm/compose/hierarchical.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/base/seeded_fault.h"
#include "runtime/base/status.h"
#include "runtime/comm/compose/background.h"
#include "runtime/comm/sum/sum_method.h"
#include "runtime/comm/sum/visited_sum.h"

namespace tessera {
namespace {

class HierarchicalCollectives : public Collectives {
 public:
  HierarchicalCollectives(std::shared_ptr<Collectives> inside, std::shared_ptr<Collectives> across)
      : inside_(std::move(inside)), across_(std::move(across)), places_(inside_->size()), hosts_(across_->size()) {}

  int rank() const override { return across_->rank() * places_ + inside_->rank(); }
  int size() const override { return hosts_ * places_; }
  TransportKind kind() const override { return TransportKind::kHierarchical; }
  std::string transport() const override {
    return "hierarchical(" + inside_->transport() + ", " + across_->transport() + ")";
  }

  int compressed_part() const override { return across_->compressed_part() * places_; }

  absl::StatusOr<std::unique_ptr<CommBuffer>> allocate(std::size_t bytes) override { return inside_->allocate(bytes); }

  Work broadcast(std::string_view label, void* data, std::size_t bytes, int root) override {
    return Work(ended(spread(label, data, bytes, root)));
  }
  Work all_to_all(std::string_view label, const void* input, void* output, std::size_t bytes) override {
    return Work(ended(exchange(label, static_cast<const std::byte*>(input), output, bytes)));
  }
  Work barrier(std::string_view label) override { return Work(ended(meet(label))); }

  void abort(const absl::Status& reason) override {
    inside_->abort(reason);
    across_->abort(reason);
  }
  void leave() override {
    inside_->leave();
    across_->leave();
  }
  bool end_if_left_alone(HasKey has_key) override {
    const bool ended_inside = inside_->end_if_left_alone(has_key);
    return across_->end_if_left_alone(has_key) || ended_inside;
  }

 protected:
  Work do_all_gather(const GatherCall& call) override { return Work(ended(gather(call))); }
  Work do_reduce(const ReduceCall& call) override {
    const auto& [scatters, label, input, dtype, output, numel, options] = call;
    auto* const from = static_cast<std::byte*>(input);
    ReduceOptions across = options;
    across.waits = Waits::kAtOnce;  // the reductions across hosts are over when they return
    if (scatters) return Work(ended(scatter(label, from, dtype, output, numel, across)));
    across.visitor = nullptr;  // the visitor sees the output when all parts are there
    const absl::Status status = ended(reduce(label, from, dtype, output, numel, across));
    if (status.ok()) visit_sums(options.visitor, 0, output, numel);
    return Work(status);
  }

 private:
  /// First gathers, across hosts, the shards of the ranks at this rank's place in their hosts. Then gathers, inside
  /// this host, the ranks' parts of the whole.
  absl::Status gather(const GatherCall& call) {
    const std::size_t bytes = call.bytes_per_rank;
    auto* const full = static_cast<std::byte*>(call.full);
    TESSERA_ASSIGN_OR_RETURN(std::byte * shards, scratch(hosts_ * bytes));
    TESSERA_RETURN_IF_ERROR(across_->all_gather(call.label, call.shard, shards, bytes, call.options).wait());
    for (int host = 0; host < hosts_; ++host)
      TESSERA_RETURN_IF_ERROR(
          inside_->all_gather(call.label, shards + host * bytes, full + host * places_ * bytes, bytes).wait());
    return absl::OkStatus();
  }
  /// First reduces inside this host. For each host, this rank gets the sum of one slice, which belongs to the rank of
  /// that host with the same local rank as this rank. Then reduces these sums across hosts.
  absl::Status scatter(std::string_view label, std::byte* input, DType dtype, float* output, std::size_t numel,
                       const ReduceOptions& options) {
    TESSERA_ASSIGN_OR_RETURN(std::byte * memory, scratch(hosts_ * numel * sizeof(float)));
    auto* sums = reinterpret_cast<float*>(memory);
    const std::size_t host_bytes = places_ * numel * size_of(dtype);
    for (int host = 0; host < hosts_; ++host)
      TESSERA_RETURN_IF_ERROR(
          inside_->reduce_scatter(label, input + host * host_bytes, dtype, sums + host * numel, numel).wait());
    return across_->reduce_scatter(label, sums, DType::kF32, output, numel, options).wait();
  }
  /// Makes a reduction. Every rank sums one of L equal parts over its host, then over the hosts. The elements that are
  /// left over (fewer than L) are reduced whole on every rank, and are never compressed.
  absl::Status reduce(std::string_view label, std::byte* input, DType dtype, float* output, std::size_t numel,
                      const ReduceOptions& options) {
    const std::size_t part = numel / places_, done = part * places_;
    if (part > 0) {
      TESSERA_ASSIGN_OR_RETURN(std::byte * memory, scratch(part * sizeof(float)));
      auto* sums = reinterpret_cast<float*>(memory);
      TESSERA_RETURN_IF_ERROR(inside_->reduce_scatter(label, input, dtype, sums, part).wait());
      TESSERA_RETURN_IF_ERROR(across_->all_reduce(label, sums, DType::kF32, sums, part, options).wait());
      TESSERA_RETURN_IF_ERROR(reduce_whole(label, input + done * size_of(dtype), dtype, output + done, numel - done));
      return inside_->all_gather(label, sums, output, part * sizeof(float)).wait();
    }
    return reduce_whole(label, input, dtype, output, numel);
  }
  absl::Status reduce_whole(std::string_view label, std::byte* input, DType dtype, float* output, std::size_t numel) {
    if (numel == 0) return absl::OkStatus();
    TESSERA_RETURN_IF_ERROR(inside_->all_reduce(label, input, dtype, output, numel).wait());
    if (seeded_fault(SeededFault::kRemainderOfOwnHost)) return absl::OkStatus();
    return across_->all_reduce(label, output, DType::kF32, output, numel).wait();
  }
  absl::Status spread(std::string_view label, void* data, std::size_t bytes, int root) {
    if (root < 0 || root >= size())
      return make_error(ExitCode::kInternal, std::string(label) + " broadcast: root is " + std::to_string(root) +
                                                 " of " + std::to_string(size()) + " ranks");
    if (inside_->rank() == root % places_)
      TESSERA_RETURN_IF_ERROR(across_->broadcast(label, data, bytes, root / places_).wait());
    return inside_->broadcast(label, data, bytes, root % places_).wait();
  }
  /// First exchanges inside the host: this rank gets the parts that its host's ranks send to the ranks at this rank's
  /// place on all hosts. Then sends each of those ranks its part across hosts.
  absl::Status exchange(std::string_view label, const std::byte* input, void* output, std::size_t bytes) {
    const std::size_t host_bytes = places_ * bytes;
    TESSERA_ASSIGN_OR_RETURN(std::byte * parcels, scratch(hosts_ * host_bytes));
    for (int host = 0; host < hosts_; ++host)
      TESSERA_RETURN_IF_ERROR(
          inside_->all_to_all(label, input + host * host_bytes, parcels + host * host_bytes, bytes).wait());
    return across_->all_to_all(label, parcels, output, host_bytes).wait();
  }
  /// Makes three barriers. After the first, all ranks of this host are here. After the second, the ranks that have this
  /// rank's place on other hosts are here, too. Therefore all ranks are here after the third.
  absl::Status meet(std::string_view label) {
    TESSERA_RETURN_IF_ERROR(inside_->barrier(label).wait());
    TESSERA_RETURN_IF_ERROR(across_->barrier(label).wait());
    return inside_->barrier(label).wait();
  }
  /// Returns scratch memory. All ranks of a host ask for the same size in the same call, so allocate() is called
  /// collectively, as it requires.
  absl::StatusOr<std::byte*> scratch(std::size_t bytes) {
    if (!scratch_ || scratch_->bytes() < bytes) {
      scratch_.reset();
      TESSERA_ASSIGN_OR_RETURN(scratch_, inside_->allocate(bytes));
    }
    return scratch_->data();
  }
  /// Ends both groups (inside and across) if a call in one of them fails. Otherwise peers in the other group would wait
  /// for ever.
  absl::Status ended(absl::Status status) {
    if (!status.ok()) abort(status);
    return status;
  }

  const std::shared_ptr<Collectives> inside_, across_;
  const int places_, hosts_;
  std::unique_ptr<CommBuffer> scratch_;
};

}  // namespace

std::shared_ptr<Collectives> hierarchical_collectives(std::shared_ptr<Collectives> inside,
                                                      std::shared_ptr<Collectives> across) {
  return working_in_background(
      summing_by_methods(std::make_shared<HierarchicalCollectives>(std::move(inside), std::move(across))));
}

}  // namespace tessera
