#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <deque>
#include <functional>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "engine/weights/open_weights.h"
#include "engine/weights/weights_kind.h"
#include "engine/weights/weights_pickle.h"
#include "runtime/base/errno_hint.h"
#include "runtime/base/hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

// This file works as follows. LibTorch's reader finds the records of the zip archive; it asks FileRanges for bytes of
// the file, and its exceptions become errors (`without_exceptions`). ArchiveSource::open reads the pickle, chooses the
// part, and compares every tensor with its storage's record before anything is read. `read` loads a storage when one of
// its tensors is wanted, and keeps the last two storages. If LibTorch finds no pickle, `other_archive` finds out the
// kind of the file.

constexpr std::size_t kMostPickleBytes = std::size_t{256} << 20;
constexpr std::size_t kStoragesInMemory = 2;
constexpr const char* kSaveHint =
    "[T0314] hint: write it with save_weights, or with torch.save(model.state_dict(), path)";

/// Gives ranges of the file to LibTorch's reader of archives. That reader throws if a read fails or returns fewer
/// bytes.
class FileRanges : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit FileRanges(InputFile file) : file_(std::move(file)) {}
  std::size_t size() const override { return file_.size(); }
  std::size_t read(std::uint64_t place, void* to, std::size_t bytes, const char*) const override {
    std::size_t done = 0;
    while (done < bytes) {
      const ssize_t got =
          ::pread(file_.fd(), static_cast<char*>(to) + done, bytes - done, static_cast<off_t>(place + done));
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

 private:
  InputFile file_;
};

std::optional<at::ScalarType> type_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"FloatStorage", at::kFloat},
      {"DoubleStorage", at::kDouble},
      {"HalfStorage", at::kHalf},
      {"BFloat16Storage", at::kBFloat16},
      {"LongStorage", at::kLong},
      {"IntStorage", at::kInt},
      {"ShortStorage", at::kShort},
      {"CharStorage", at::kChar},
      {"ByteStorage", at::kByte},
      {"BoolStorage", at::kBool},
      {"ComplexFloatStorage", at::kComplexFloat},
      {"ComplexDoubleStorage", at::kComplexDouble},
      // Python has no storage classes for the following types; C++ writes these names in the place of storage classes.
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2},
      {"uint16", at::kUInt16},
      {"uint32", at::kUInt32},
      {"uint64", at::kUInt64},
      {"Float8_e4m3fnStorage", at::kFloat8_e4m3fn},
      {"Float8_e5m2Storage", at::kFloat8_e5m2},
      {"UInt16Storage", at::kUInt16},
      {"UInt32Storage", at::kUInt32},
      {"UInt64Storage", at::kUInt64},
  };
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? std::nullopt : std::optional(found->second);
}

absl::Status bad_archive(const std::string& what) {
  return make_error(ExitCode::kCorruptData, has_hint(what) ? what : what + ". " + kSaveHint);
}

/// Returns the number of elements that the tensor's storage must have at least; nothing if the numbers cannot belong to
/// a tensor.
std::optional<std::int64_t> reach_of(const PickledTensor& tensor) {
  std::int64_t last = tensor.offset;
  bool is_empty = false;
  if (tensor.offset < 0) return std::nullopt;
  for (std::size_t i = 0; i < tensor.sizes.size(); ++i) {
    const std::int64_t size = tensor.sizes[i], stride = tensor.strides[i];
    std::int64_t step = 0;
    if (size < 0 || stride < 0) return std::nullopt;
    is_empty = is_empty || size == 0;
    if (size == 0) continue;
    if (__builtin_mul_overflow(size - 1, stride, &step) || __builtin_add_overflow(last, step, &last))
      return std::nullopt;
  }
  return is_empty                                 ? std::optional<std::int64_t>(0)
         : __builtin_add_overflow(last, 1, &last) ? std::nullopt
                                                  : std::optional(last);
}

absl::Status no_memory() {
  return make_error(ExitCode::kOsResource, "cannot be read: out of memory. " + limit_hint(ENOMEM));
}

/// Calls `body`, and turns an exception of LibTorch's reader into an error.
template <class Result>
absl::StatusOr<Result> without_exceptions(const std::function<absl::StatusOr<Result>()>& body) {
  std::string what;
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return no_memory();
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  if (limit_in(what) == ENOMEM) return no_memory();
  // LibTorch appends words about itself to the error's text ("This is an internal miniz error").
  const std::string first = what.substr(0, std::min(what.find('\n'), what.find(". This is ")));
  return bad_archive("is a damaged archive: " + first + ". [T0315] hint: copy or write it again");
}

class ArchiveSource : public TensorSource {
 public:
  explicit ArchiveSource(const std::shared_ptr<FileRanges>& file) : bytes_(file->size()), archive_(file) {}

  bool is_of_pytorch() { return archive_.hasRecord("data.pkl"); }

  absl::Status open(const WeightsRequest& request) {
    TESSERA_RETURN_IF_ERROR(expect_order_of_bytes());
    TESSERA_ASSIGN_OR_RETURN(pickled_, read_pickle());
    if (pickled_.is_program)
      return bad_archive(
          "is a TorchScript program, as torch.jit.save writes it. [T0316] hint: in Python, "
          "torch.save(torch.jit.load(path).state_dict(), "
          "new_path) writes its weights; a C++ program trains the script itself by ModuleView::of");
    TESSERA_ASSIGN_OR_RETURN(WeightsPart part, choose_part(pickled_.root, request));
    others_ = std::move(part.others);
    unused_ = std::move(part.unused);
    // Every tensor is compared before the first value is read.
    for (const auto& [name, number] : part.tensors) {
      const PickledTensor& tensor = pickled_.tensors[number];
      TESSERA_RETURN_IF_ERROR(compare(name, tensor));
      tensors_.emplace(name, StoredTensor{tensor.type, type_of(tensor.type), tensor.sizes});
      pickled_by_name_.emplace(name, &tensor);
    }
    return compare_sum();
  }

  absl::StatusOr<at::Tensor> read(const std::string& name, std::int64_t first, std::int64_t numel) override {
    return without_exceptions<at::Tensor>(
        [&]() -> absl::StatusOr<at::Tensor> { return in_rows(name).narrow(0, first, numel); });
  }

 private:
  static std::string record_of(const PickledTensor& tensor) { return "data/" + tensor.record; }

  absl::Status expect_order_of_bytes() {
    if (!archive_.hasRecord("byteorder")) return absl::OkStatus();
    const auto [bytes, size] = archive_.getRecord("byteorder");
    if (std::string_view(static_cast<const char*>(bytes.get()), size) == "little") return absl::OkStatus();
    return bad_archive("was written on a machine with another order of bytes");
  }

  absl::StatusOr<PickledWeights> read_pickle() {
    const std::size_t size = archive_.getRecordSize("data.pkl");
    if (size > std::min(kMostPickleBytes, bytes_))
      return bad_archive("has a data.pkl that is larger than what weights need");
    const auto [bytes, read] = archive_.getRecord("data.pkl");
    auto pickled = read_weights_pickle({static_cast<const char*>(bytes.get()), read});
    if (pickled.ok()) return pickled;
    return bad_archive("is not a file of weights (names and tensors, as PyTorch writes them), or cut short: " +
                       message_of(pickled.status()));
  }

  absl::Status compare(const std::string& name, const PickledTensor& tensor) {
    const std::optional<at::ScalarType> type = type_of(tensor.type);
    if (!type) return bad_archive(c10::str(name, ": elements of the type ", tensor.type, " are not known"));
    const auto element = static_cast<std::int64_t>(c10::elementSize(*type));
    std::int64_t wanted = tensor.storage_numel;
    if (wanted < 0 || __builtin_mul_overflow(wanted, tensor.is_untyped ? 1 : element, &wanted))
      return bad_archive(c10::str(name, ": a storage cannot have ", tensor.storage_numel, " elements"));
    const std::optional<std::int64_t> reach = reach_of(tensor);
    if (!reach || *reach > wanted / element)
      return bad_archive(c10::str(name, ": the tensor reaches beyond its storage ", tensor.record, " of ", wanted,
                                  " bytes: sizes ", c10::str(at::IntArrayRef(tensor.sizes)), ", strides ",
                                  c10::str(at::IntArrayRef(tensor.strides)), ", offset ", tensor.offset, ", ", element,
                                  " bytes an element"));
    if (wanted == 0) return absl::OkStatus();
    const std::string record = record_of(tensor);
    if (!archive_.hasRecord(record)) return bad_archive(c10::str(name, ": its storage ", tensor.record, " is missing"));
    const std::size_t got = archive_.getRecordSize(record);
    if (got != static_cast<std::size_t>(wanted))
      return bad_archive(
          c10::str(name, ": its storage ", tensor.record, " wants ", wanted, " bytes, and the file has ", got));
    if (got > bytes_)
      return bad_archive(c10::str(name, ": its storage ", tensor.record, " has ", got, " bytes, more than the file"));
    if (records_.insert(record).second) bytes_of_records_ += got;
    // A tensor may repeat one element of the file (stride 0); the module still needs memory for all elements.
    std::int64_t elements = 1;
    for (const std::int64_t size : tensor.sizes) {
      if (__builtin_mul_overflow(elements, size, &elements))
        return bad_archive(
            c10::str(name, ": a tensor cannot have the sizes ", c10::str(at::IntArrayRef(tensor.sizes))));
    }
    return absl::OkStatus();
  }

  /// Checks that the records together are not larger than the file. Otherwise records overlap, and bytes would be read
  /// several times.
  absl::Status compare_sum() const {
    if (bytes_of_records_ <= bytes_) return absl::OkStatus();
    return bad_archive(
        c10::str("has storages of ", bytes_of_records_, " bytes in all, more than the file, which has ", bytes_));
  }

  /// Returns all elements of a tensor, flat: a view of its storage if they lie there row by row, else a copy.
  at::Tensor in_rows(const std::string& name) {
    if (copied_name_ == name) return copy_;
    const PickledTensor& pickled = *pickled_by_name_.at(name);
    const at::Tensor tensor = at::empty({0}, at::TensorOptions(*type_of(pickled.type)))
                                  .set_(storage(pickled), pickled.offset, pickled.sizes, pickled.strides);
    if (tensor.is_contiguous()) return tensor.view({-1});
    copied_name_ = name;
    return copy_ = tensor.contiguous().view({-1});
  }

  at::Storage storage(const PickledTensor& tensor) {
    if (tensor.storage_numel == 0) return at::empty({0}, at::TensorOptions(at::kByte)).storage();
    const std::string record = record_of(tensor);
    const auto known = std::ranges::find(storages_, record, &std::pair<std::string, at::Storage>::first);
    if (known != storages_.end()) return known->second;
    if (storages_.size() == kStoragesInMemory) storages_.pop_front();
    const std::size_t bytes = archive_.getRecordSize(record);
    const at::Tensor memory = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte));
    archive_.getRecord(record, memory.mutable_data_ptr(), bytes);
    return storages_.emplace_back(record, memory.storage()).second;
  }

  const std::size_t bytes_;
  caffe2::serialize::PyTorchStreamReader archive_;
  PickledWeights pickled_;
  std::map<std::string, const PickledTensor*> pickled_by_name_;
  std::set<std::string> records_;
  std::size_t bytes_of_records_ = 0;
  std::deque<std::pair<std::string, at::Storage>> storages_;  ///< storages that were read last, each with its record
  std::string copied_name_;                                   ///< the name of the tensor in copy_
  at::Tensor copy_;
};

/// Returns an error that names the kind of a zip archive in which LibTorch's reader finds no `data.pkl`.
absl::Status other_archive(const FileRanges& file, const absl::Status& of_reader) {
  const ReadBytes read = [&](std::uint64_t place, std::size_t bytes, char* to) {
    return file.read(place, to, bytes, "") == bytes;
  };
  const auto names = names_in_zip(read, file.size());
  if (!names)
    return bad_archive(
        "is cut short: it begins as a zip archive, and the end of one is missing. [T0317] hint: copy or download it "
        "again");
  if (!of_reader.ok() && std::ranges::any_of(*names, [](const auto& name) { return name.ends_with("/data.pkl"); }))
    return of_reader;
  const FileKind kind = kind_of_zip(*names);
  return bad_archive(std::string(kind.what) + ". " + std::string(kind.hint));
}

}  // namespace

absl::StatusOr<std::unique_ptr<TensorSource>> open_archive(InputFile file, const WeightsRequest& request) {
  using Source = std::unique_ptr<ArchiveSource>;
  const auto ranges = std::make_shared<FileRanges>(std::move(file));
  auto source =
      without_exceptions<Source>([&]() -> absl::StatusOr<Source> { return std::make_unique<ArchiveSource>(ranges); });
  if (!source.ok() || !(*source)->is_of_pytorch()) return other_archive(*ranges, source.status());
  const auto opened = without_exceptions<bool>([&]() -> absl::StatusOr<bool> {
    TESSERA_RETURN_IF_ERROR((*source)->open(request));
    return true;
  });
  TESSERA_RETURN_IF_ERROR(opened.status());
  return std::unique_ptr<TensorSource>(*std::move(source));
}

}  // namespace tessera
