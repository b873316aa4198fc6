#include "engine/activations/saved_activations.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/activations/activation_tier.h"
#include "engine/autograd/saved_version.h"
#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "sharding/unit.h"

namespace tessera {
namespace {

// This file works as follows. LibTorch's hooks (Hooks, one per saved tensor) ask the Store, which the hooks and the
// SavedActivations share. Store::put decides whether a tensor is offloaded, and which bytes of its storage go to the
// tier. A Put stands for those bytes; tensors that are saved later and lie in the same bytes share the Put. Store::get
// looks for the bytes in the original storage, then in the storage that the last `get` returned, and only then reads
// the tier. The Store holds storages weakly, so memory is freed with its last user; ~Put drops the bytes from the tier.

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// The range [begin, end) of the bytes of a storage that a tensor views.
struct ByteRange {
  std::size_t begin = 0, end = 0;
  std::size_t bytes() const { return end - begin; }
  bool contains(const ByteRange& other) const { return begin <= other.begin && other.end <= end; }
};

ByteRange range_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const std::size_t element = tensor.element_size();
  const std::size_t begin = static_cast<std::size_t>(tensor.storage_offset()) * element;
  return {begin, begin + static_cast<std::size_t>(last + 1) * element};
}

/// Returns the storage; nothing if it was freed.
std::optional<c10::Storage> living(const WeakStorage& weak) {
  if (auto storage = weak.lock()) return c10::Storage(std::move(storage));
  return std::nullopt;
}

}  // namespace

/// State that a SavedActivations shares with the graphs. Any thread may call it.
class SavedActivations::Store : public std::enable_shared_from_this<SavedActivations::Store> {
 public:
  /// Bytes on the tier. They stay until the last saved tensor that lies in them is gone.
  struct Put {
    ~Put() { store->drop(*this); }
    std::shared_ptr<Store> store;
    ActivationTier::Id id = 0;
    WeakStorage original;  ///< weak, so the memory can be freed, but the StorageImpl's address is not reused
    std::uint32_t version = 0;
    ByteRange range;  ///< the position of the bytes in `original`
    // The store's mutex guards the next two members.
    std::optional<WeakStorage> brought_back;  ///< the storage that the last `get` returned
    std::size_t begin = 0;                    ///< position of the range's first byte in `brought_back`
  };

  Store(std::unique_ptr<ActivationTier> tier, SavedActivationsOptions options)
      : tier_(std::move(tier)), options_(std::move(options)) {
    for (const c10::Storage& storage : options_.staying) staying_.push_back(storage.getWeakStorageImpl());
    options_.staying.clear();
  }

  /// Puts the bytes that `tensor` views on the tier. Returns null if the tensor is to be kept in memory.
  std::shared_ptr<Put> put(const at::Tensor& tensor);
  /// Returns where the bytes of `put` lie in memory. It brings them back from the tier first if no storage in memory
  /// has them.
  StoredBytes get(Put& put);

  ActivationCounts counts() const {
    const MutexLock lock(mutex_);
    return tier_->counts();
  }
  std::int64_t memory_bytes() const { return tier_->memory_bytes(); }
  void close() {
    const MutexLock lock(mutex_);
    if (!forked_) tier_->close();
  }
  void enter_forked_process() {
    const MutexLock lock(mutex_);
    forked_ = shared_from_this();
  }

 private:
  bool is_offloaded(const at::Tensor& tensor) const;
  std::optional<ByteRange> range_to_put(const at::Tensor& tensor) const;
  void drop(const Put& put);

  mutable Mutex mutex_;
  const std::unique_ptr<ActivationTier> tier_;
  SavedActivationsOptions options_;
  std::vector<WeakStorage> staying_;
  std::unordered_multimap<const c10::StorageImpl*, std::weak_ptr<Put>> by_storage_ ABSL_GUARDED_BY(mutex_);
  /// The values that were brought back last, the latest first. A tensor that shares their bytes usually comes next.
  struct Recent {
    const Put* put = nullptr;
    c10::Storage storage;
  };
  std::array<Recent, 2> recent_ ABSL_GUARDED_BY(mutex_);
  /// Keeps this store alive in a forked process; null otherwise. The tier there belongs to the parent process and must
  /// not be destroyed.
  std::shared_ptr<Store> forked_ ABSL_GUARDED_BY(mutex_);
};

namespace {

/// Saves one tensor for one backward. LibTorch calls the pack hook when an operator saves the tensor, and the unpack
/// hook when backward needs the tensor.
class Hooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Hooks(std::shared_ptr<SavedActivations::Store> store) : store_(std::move(store)) {}

  void call_pack_hook(const at::Tensor& tensor) override {
    version_ = SavedVersion(tensor);
    put_ = store_->put(tensor);
    store_.reset();
    if (!put_) {
      // A graph that held its own output would never be freed, so `kept_` is a copy of the tensor object without its
      // graph.
      kept_ = tensor.is_leaf() ? tensor : at::Tensor(tensor.tensor_data());
      return;
    }
    options_ = tensor.options();
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
    begin_ = range_of(tensor).begin - put_->range.begin;
  }

  at::Tensor call_unpack_hook() override {
    version_.expect_unchanged();
    if (kept_.defined()) return kept_;
    const StoredBytes bytes = put_->store->get(*put_);
    const at::AutoDispatchBelowADInplaceOrView no_graph;
    at::Tensor tensor = at::empty({0}, options_);
    tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(bytes.storage);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        sizes_, strides_, static_cast<std::int64_t>((bytes.begin + begin_) / tensor.element_size()));
    // The version counter is shared, as in LibTorch: a write in place counts for all tensors of the storage.
    torch::autograd::impl::set_version_counter(tensor, version_.counter());
    return tensor;
  }

 private:
  std::shared_ptr<SavedActivations::Store> store_;  ///< null once the tensor is saved
  SavedVersion version_;
  at::Tensor kept_;  ///< the tensor, without its graph, if it was not offloaded
  std::shared_ptr<SavedActivations::Store::Put> put_;
  at::TensorOptions options_;
  std::vector<std::int64_t> sizes_, strides_;
  std::size_t begin_ = 0;  ///< offset of the tensor's first byte in the bytes that were put on the tier
};

}  // namespace

// ---- What is offloaded ----------------------------------------------------------------------------------------------

bool SavedActivations::Store::is_offloaded(const at::Tensor& tensor) const {
  if (tensor.layout() != at::kStrided || at::isTensorSubclassLike(tensor) || !tensor.has_storage()) return false;
  if (tensor.device() != options_.device || tensor.numel() == 0 || tensor.is_conj() || tensor.is_neg()) return false;
  if (tensor.is_quantized() || (tensor.is_leaf() && tensor.requires_grad()) || unit_of(tensor)) return false;
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto is_it = [storage](const WeakStorage& staying) { return staying._unsafe_get_target() == storage; };
  return storage->data() != nullptr && std::ranges::none_of(staying_, is_it);
}

std::optional<ByteRange> SavedActivations::Store::range_to_put(const at::Tensor& tensor) const {
  if (!is_offloaded(tensor)) return std::nullopt;
  ByteRange range = range_of(tensor);
  const std::size_t storage_bytes = tensor.storage().nbytes();
  if (tensor.nbytes() < range.bytes()) {  // the view has gaps
    if (4 * tensor.nbytes() < storage_bytes) return std::nullopt;
    range = {0, storage_bytes};
  }
  if (range.bytes() < options_.min_bytes || range.end > storage_bytes) return std::nullopt;
  return range;
}

std::shared_ptr<SavedActivations::Store::Put> SavedActivations::Store::put(const at::Tensor& tensor) {
  const std::optional<ByteRange> range = range_to_put(tensor);
  if (!range) return nullptr;
  const c10::Storage& storage = tensor.storage();
  const auto version = static_cast<std::uint32_t>(tensor._version());
  std::vector<std::shared_ptr<Put>> others;  // destroyed after the mutex is unlocked, since ~Put locks it
  const MutexLock lock(mutex_);
  if (forked_) return nullptr;
  const auto [first, last] = by_storage_.equal_range(storage.unsafeGetStorageImpl());
  for (auto each = first; each != last; ++each) {
    std::shared_ptr<Put> put = each->second.lock();
    if (!put) continue;
    others.push_back(put);
    const bool is_aligned = (range->begin - put->range.begin) % tensor.element_size() == 0;
    if (put->version == version && put->range.contains(*range) && is_aligned) return put;
  }
  const ActivationTier::Id id = tier_->put(storage, range->begin, range->bytes());
  std::shared_ptr<Put> put(new Put{.store = shared_from_this(),
                                   .id = id,
                                   .original = storage.getWeakStorageImpl(),
                                   .version = version,
                                   .range = *range,
                                   .brought_back = std::nullopt});
  by_storage_.emplace(storage.unsafeGetStorageImpl(), put);
  return put;
}

StoredBytes SavedActivations::Store::get(Put& put) {
  Recent goes;  // a storage that is freed after the lock is released
  const MutexLock lock(mutex_);
  TORCH_CHECK(!forked_,
              "activations of the training process are wanted in a process that was forked from it. [T0088] hint: run "
              "backward where forward ran");
  if (auto storage = living(put.original)) return {*std::move(storage), put.range.begin};
  if (put.brought_back) {
    if (auto storage = living(*put.brought_back)) return {*std::move(storage), put.begin};
  }
  goes = std::exchange(recent_[1], std::exchange(recent_[0], {}));
  StoredBytes bytes = tier_->get(put.id);
  recent_[0] = {&put, bytes.storage};
  put.brought_back = bytes.storage.getWeakStorageImpl();
  put.begin = bytes.begin;
  return bytes;
}

/// It is called by destructors, so it does not throw.
void SavedActivations::Store::drop(const Put& put) {
  Recent goes;  // a storage that is freed after the lock is released
  try {
    const MutexLock lock(mutex_);
    for (Recent& recent : recent_) {
      if (recent.put == &put) goes = std::exchange(recent, {});
    }
    const auto [first, last] = by_storage_.equal_range(put.original._unsafe_get_target());
    for (auto each = first; each != last;) each = each->second.expired() ? by_storage_.erase(each) : std::next(each);
    if (!forked_) tier_->drop(put.id);
  } catch (const std::exception& error) {
    log_error(std::string("activations: ") + error.what());
  }
}

// ---- The object itself ----------------------------------------------------------------------------------------------

SavedActivations::SavedActivations(std::unique_ptr<ActivationTier> tier, SavedActivationsOptions options)
    : store_(std::make_shared<Store>(std::move(tier), std::move(options))) {}

SavedActivations::~SavedActivations() {
  try {
    store_->close();
  } catch (const std::exception& error) {
    log_error(std::string("activations: ") + error.what());
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SavedActivations::make() {
  return std::make_unique<Hooks>(store_);
}

void SavedActivations::enter_forked_process() { store_->enter_forked_process(); }

ActivationCounts SavedActivations::counts() const { return store_->counts(); }
std::int64_t SavedActivations::memory_bytes() const { return store_->memory_bytes(); }

std::shared_ptr<SavedActivations> offload_activations(const OffloadConfig& offload, const NamedTensors& whole,
                                                      const Accelerator& accelerator, int rank) {
  if (offload.activations == Tier::kMemory) return nullptr;
  std::unique_ptr<ActivationTier> tier;
  if (offload.activations == Tier::kHost) {
    tier = host_activations(accelerator, offload, rank);
  } else {
    tier = accelerator.device.is_queued ? device_nvme_activations(accelerator, offload, rank)
                                        : nvme_activations(offload, rank);
  }
  SavedActivationsOptions options;
  options.device = accelerator.device.device;
  options.min_bytes = static_cast<std::size_t>(offload.activations_min_bytes);
  for (const auto& item : whole) {
    if (item.value().has_storage()) options.staying.push_back(item.value().storage());
  }
  auto activations = std::make_shared<SavedActivations>(std::move(tier), std::move(options));
  hook_saved_tensors(activations);
  return activations;
}

}  // namespace tessera
