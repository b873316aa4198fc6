#include "tessera/data_parallel.h"

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "engine/autograd/end_of_backward.h"
#include "engine/autograd/saved_tensor_hooks.h"
#include "engine/loop/reduce_tensor.h"
#include "engine/loop/same_call.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/comm/gather_strings.h"
#include "runtime/comm/mesh_groups.h"
#include "tessera/deferred_init.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

// This file works as follows. A post-accumulate hook on each parameter notices that a backward makes gradients. When
// the outermost backward ends, `average` runs once. Ranks first exchange their weights, and which gradients they have
// (`agree_on_gradients`). Then each bucket is packed into one flat tensor, summed over ranks, divided by the sum of the
// weights, and copied back into the gradients.

// These are the remedies that errors name, for C++ and for Python programs.
constexpr Phrase kMakeValues = {"call tessera::materialize_module first",
                                "make the module outside of tessera.deferred_init()"};
constexpr Phrase kEndOtherOwner = {"destroy that one first", "call close() of that one first"};
constexpr Phrase kDenseEmbedding = {"EmbeddingOptions::sparse(false)", "sparse=False"};
constexpr Phrase kNoSyncScope = {"NoSync", "no_sync()"};

/// Whether a rank has a gradient, and in which layout.
enum class Has : char { kNone, kDense, kSparse };

/// Parameters whose gradients are sent together.
struct GradientBucket {
  at::ScalarType type = at::kFloat;  ///< the type of the sums: fp32, or fp64
  std::vector<std::size_t> parameters;
  std::int64_t numel = 0;
};

std::string named_tensors(const char* kind, const torch::OrderedDict<std::string, at::Tensor>& tensors) {
  std::ostringstream text;
  for (const auto& item : tensors) {
    text << kind << " " << item.key();
    if (item.value().defined()) text << " of " << item.value().scalar_type() << " " << item.value().sizes();
    text << "\n";
  }
  return text.str();
}

/// Returns the module as text: one line for each parameter and buffer.
std::string outline_of(const torch::nn::Module& module) {
  return named_tensors("parameter", module.named_parameters()) + named_tensors("buffer", module.named_buffers());
}

/// Returns the error text for the first line in which an outline differs from rank 0's; empty if no line differs.
std::string difference_of(const std::string& own, const std::string& of_rank_0) {
  std::istringstream mine(own), theirs(of_rank_0);
  std::string a, b;
  while (true) {
    const bool has_a = static_cast<bool>(std::getline(mine, a)), has_b = static_cast<bool>(std::getline(theirs, b));
    if (!has_a && !has_b) return "";
    if (has_a != has_b || a != b)
      return c10::str("DataParallel: the module has ", has_a ? a : "nothing more", " where rank 0's has ",
                      has_b ? b : "nothing more", ". [T0190] hint: construct the module alike on every rank");
  }
}

}  // namespace

struct DataParallel::State {
  State(std::shared_ptr<torch::nn::Module> module_given, const Mesh& mesh, const DataParallelOptions& options)
      : module(std::move(module_given)), group(value_or_throw(groups_of(mesh).world("data_parallel"))) {
    put_engine_in_place();  // Tessera's autograd engine notices a backward that runs inside another one
    expect_same_modules(options);
    list_parameters();
    plan_buckets(options.bucket_mb);
    for (const at::Tensor& parameter : parameters) broadcast_value(parameter);
    broadcast_buffers();
    set_hooks();
  }
  ~State() {
    for (const at::Tensor& parameter : hooked) autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  void expect_same_modules(const DataParallelOptions& options);
  void list_parameters();
  void plan_buckets(double bucket_mb);
  void set_hooks();
  std::string problem(const DataParallelOptions& options) const;

  void broadcast_value(const at::Tensor& tensor);
  void broadcast_buffers();

  void on_gradient();
  void average();
  struct Agreed {
    std::vector<Has> on_any_rank;  ///< [parameter]: kDense if some rank has the gradient, else kNone
    double weight = 0;             ///< the sum of all ranks' weights
  };
  Agreed agree_on_gradients();
  void average(const GradientBucket& bucket, const Agreed& agreed);

  struct AfterAccumulation;

  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<Collectives> group;
  std::vector<at::Tensor> parameters;  ///< each parameter once, even if it has several names
  std::vector<std::string> names;      ///< one for each parameter
  std::vector<at::Tensor> hooked;
  std::vector<GradientBucket> buckets;
  at::Tensor memory;  ///< [numel of the largest fp32 bucket], in the group's memory
  std::unique_ptr<CommBuffer> buffer;
  int open_no_syncs = 0;
  double weight = 1;  ///< this rank's weight in the next averaging
  /// True where gradients will be averaged when the running backward ends.
  std::shared_ptr<bool> will_average = std::make_shared<bool>(false);
};

struct DataParallel::State::AfterAccumulation : autograd::PostAccumulateGradHook {
  explicit AfterAccumulation(State& state) : state(state) {}
  void operator()(const autograd::Variable&) override { state.on_gradient(); }
  State& state;
};

/// Returns the reason why this rank cannot average its gradients; empty if it can.
std::string DataParallel::State::problem(const DataParallelOptions& options) const {
  if (!(options.bucket_mb > 0))
    return c10::str("DataParallel wants a bucket_mb above 0, got ", options.bucket_mb,
                    ". [T0191] hint: leave it out for the usual size");
  for (const auto& item : module->named_parameters()) {
    if (is_deferred(item.value()))
      return c10::str("DataParallel: parameter ", item.key(), " is deferred. [T0192] hint: ", kMakeValues,
                      "; an Engine takes it as it is");
    if (autograd::impl::post_acc_grad_hooks(item.value()))
      return c10::str(
          "DataParallel: parameter ", item.key(),
          " belongs to an Engine or to another DataParallel that still lives. [T0193] hint: ", kEndOtherOwner);
  }
  return "";
}

void DataParallel::State::expect_same_modules(const DataParallelOptions& options) {
  const std::string own = outline_of(*module);
  const std::string of_rank_0 = value_or_throw(broadcast_string(*group, "DataParallel", own, 0));
  const std::string difference = difference_of(own, of_rank_0);
  expect_same_call(*group, c10::str("DataParallel with buckets of ", options.bucket_mb, " MiB"),
                   difference.empty() ? problem(options) : difference);
}

void DataParallel::State::list_parameters() {
  for (const auto& item : module->named_parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(item.value()); };
    if (std::any_of(parameters.begin(), parameters.end(), same)) continue;
    parameters.push_back(item.value());
    names.push_back(item.key());
  }
}

/// Fills buckets from the last parameter on, since backward computes the last gradients first.
void DataParallel::State::plan_buckets(double bucket_mb) {
  const double most = bucket_mb * 1024 * 1024 / sizeof(float);
  std::int64_t largest = 0;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    const at::ScalarType type = parameters[i].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const std::int64_t numel = parameters[i].numel();
    const bool fits =
        !buckets.empty() && buckets.back().type == type && static_cast<double>(buckets.back().numel + numel) <= most;
    if (!fits) buckets.push_back({type, {}, 0});
    buckets.back().parameters.push_back(i);
    buckets.back().numel += numel;
    if (type == at::kFloat) largest = std::max(largest, buckets.back().numel);
  }
  buffer = value_or_throw(group->allocate(static_cast<std::size_t>(largest) * sizeof(float)));
  memory = at::from_blob(buffer->data(), {largest}, at::kFloat);
}

void DataParallel::State::set_hooks() {
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.requires_grad()) continue;
    autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<AfterAccumulation>(*this));
    hooked.push_back(parameter);
  }
}

void DataParallel::State::broadcast_value(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const at::Tensor value = tensor.detach().to(at::kCPU).contiguous().clone();
  const auto bytes = static_cast<std::size_t>(value.nbytes());
  throw_if_error(group->broadcast("DataParallel", value.mutable_data_ptr(), bytes, 0).wait());
  throw_if_error(group->status());
  if (group->rank() != 0) tensor.copy_(value);
}

void DataParallel::State::broadcast_buffers() {
  for (const auto& item : module->named_buffers()) {
    if (item.value().defined()) broadcast_value(item.value());
  }
}

void DataParallel::State::on_gradient() {
  if (*will_average || open_no_syncs > 0) return;
  *will_average = true;
  // A backward that throws drops its callbacks. `will_average` is cleared in that case too, so that the next backward
  // queues its own callback.
  const std::shared_ptr<void> at_its_end(nullptr, [flag = will_average](void*) { *flag = false; });
  at_end_of_backward([this, at_its_end] { average(); });
}

void DataParallel::State::average() {
  const at::NoGradGuard no_grad;
  const Agreed agreed = agree_on_gradients();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (weight == 0 && agreed.on_any_rank[i] == Has::kNone) parameters[i].mutable_grad().reset();
  }
  if (group->size() > 1) {
    for (const GradientBucket& bucket : buckets) average(bucket, agreed);
  }
  weight = 1;
}

/// It is collective. Each rank sends its weight, and one byte (Has) for each gradient.
DataParallel::State::Agreed DataParallel::State::agree_on_gradients() {
  const std::size_t count = parameters.size(), bytes = sizeof weight + count;
  std::vector<std::byte> own(bytes), all(bytes * static_cast<std::size_t>(group->size()));
  std::memcpy(own.data(), &weight, sizeof weight);
  for (std::size_t i = 0; i < count; ++i) {
    const at::Tensor& gradient = parameters[i].grad();
    Has has = Has::kNone;
    if (gradient.defined() && weight > 0) has = gradient.layout() == at::kStrided ? Has::kDense : Has::kSparse;
    own[sizeof weight + i] = static_cast<std::byte>(has);
  }
  throw_if_error(group->all_gather("gradients that ranks have", own.data(), all.data(), bytes).wait());
  throw_if_error(group->status());
  Agreed agreed{std::vector<Has>(count, Has::kNone)};
  for (std::size_t rank = 0; rank * bytes < all.size(); ++rank) {
    const std::byte* const message = all.data() + rank * bytes;
    double theirs = 0;
    std::memcpy(&theirs, message, sizeof theirs);
    agreed.weight += theirs;
    for (std::size_t i = 0; i < count; ++i) {
      const Has has = static_cast<Has>(message[sizeof weight + i]);
      expect(has != Has::kSparse, "DataParallel: the gradient of ", names[i], " is sparse on rank ", rank,
             ", and only dense ones can be averaged. [T0194] hint: make the module with ", kDenseEmbedding);
      if (has == Has::kDense) agreed.on_any_rank[i] = Has::kDense;
    }
  }
  return agreed;
}

void DataParallel::State::average(const GradientBucket& bucket, const Agreed& agreed) {
  std::vector<std::size_t> wanted;
  std::int64_t numel = 0;
  for (const std::size_t i : bucket.parameters) {
    if (agreed.on_any_rank[i] == Has::kNone) continue;
    wanted.push_back(i);
    numel += parameters[i].numel();
  }
  if (numel == 0) return;
  const bool in_memory = bucket.type == at::kFloat;
  at::Tensor flat = in_memory ? memory.narrow(0, 0, numel) : at::empty({numel}, at::kDouble);
  const auto for_each_part = [&](const auto& visit) {
    std::int64_t at = 0;
    for (const std::size_t i : wanted) {
      visit(parameters[i], flat.narrow(0, at, parameters[i].numel()).view(parameters[i].sizes()));
      at += parameters[i].numel();
    }
  };
  for_each_part([this](const at::Tensor& parameter, const at::Tensor& part) {
    parameter.grad().defined() && weight > 0 ? part.copy_(parameter.grad()) : part.zero_();
  });
  if (weight != 1 && weight > 0) flat.mul_(weight);
  // Groups of GPUs cannot sum tensors in host memory; reduce_over_ranks copies such tensors through GPU memory.
  const bool sums = !is_of_gpus(group->kind());
  if (in_memory && sums) {
    float* const data = flat.mutable_data_ptr<float>();
    throw_if_error(group->all_reduce("gradients", data, DType::kF32, data, static_cast<std::size_t>(numel)).wait());
  } else {
    flat = reduce_over_ranks(*group, flat, Reduce::kSum);
  }
  throw_if_error(group->status());
  flat.div_(agreed.weight);
  for_each_part([](const at::Tensor& parameter, const at::Tensor& part) {
    if (!parameter.grad().defined()) parameter.mutable_grad() = at::empty_like(parameter);
    parameter.mutable_grad().copy_(part);
  });
}

DataParallel::DataParallel(std::shared_ptr<torch::nn::Module> module, const Mesh& mesh,
                           const DataParallelOptions& options)
    : state_(std::make_unique<State>(std::move(module), mesh, options)) {}

DataParallel::~DataParallel() = default;

void DataParallel::broadcast_buffers() {
  const at::NoGradGuard no_grad;
  expect_same_call(*state_->group, "broadcast_buffers");
  state_->broadcast_buffers();
}

void DataParallel::set_weight(double weight) {
  expect(std::isfinite(weight) && weight >= 0,
         "DataParallel: set_weight wants a finite number that is not negative, got ", weight,
         ". [T0195] hint: give the number of samples or tokens that the loss is a mean over");
  state_->weight = weight;
}

void DataParallel::backward_nothing() {
  expect(state_->open_no_syncs == 0, "DataParallel: backward_nothing under ", kNoSyncScope,
         ", where nothing is averaged. [T0196] hint: leave it out there");
  state_->weight = 0;
  state_->average();
}

std::size_t DataParallel::num_buckets() const { return state_->buckets.size(); }

DataParallel::NoSync::NoSync(DataParallel& parallel) : parallel_(parallel) { ++parallel_.state_->open_no_syncs; }
DataParallel::NoSync::~NoSync() { --parallel_.state_->open_no_syncs; }

}  // namespace tessera
