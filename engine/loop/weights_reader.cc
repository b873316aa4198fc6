#include "engine/loop/weights_reader.h"

#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>
#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <memory>
#include <new>
#include <optional>

#include "engine/loop/weights_pickle.h"
#include "runtime/base/input_file.h"
#include "runtime/base/process_limits.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kMostPickleBytes = std::size_t{256} << 20;
constexpr std::size_t kMostOthers = 8;  ///< that a message names
constexpr const char* kKind = "weights file";
constexpr const char* kHint = " hint: write it with save_weights, or with torch.save(model.state_dict(), path)";

/// The archive's reader asks for ranges of the file. A read that fails, or finds less, is an exception of it.
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
      {"float8_e4m3fn", at::kFloat8_e4m3fn},
      {"float8_e5m2", at::kFloat8_e5m2},
      {"uint16", at::kUInt16},
      {"uint32", at::kUInt32},
      {"uint64", at::kUInt64},
  };
  const auto found = kTypes.find(name);
  return found == kTypes.end() ? std::nullopt : std::optional(found->second);
}

/// Elements of the storage that the tensor reaches; nothing where the numbers are none of a tensor.
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

class WeightsFile {
 public:
  explicit WeightsFile(InputFile file) : bytes_(file.size()), archive_(std::make_shared<FileRanges>(std::move(file))) {}

  absl::StatusOr<std::vector<std::pair<std::string, at::Tensor>>> read() {
    TESSERA_RETURN_IF_ERROR(expect_weights());
    TESSERA_ASSIGN_OR_RETURN(const PickledWeights pickled, read_pickle());
    TESSERA_RETURN_IF_ERROR(expect_tensors_only(pickled));
    // All is compared before the first value is read.
    for (const auto& [name, tensor] : pickled.tensors) TESSERA_RETURN_IF_ERROR(compare(name, tensor));
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& [name, tensor] : pickled.tensors) tensors.emplace_back(name, make(tensor));
    return tensors;
  }

 private:
  static absl::Status damaged(const std::string& what) {
    const bool has_hint = what.find("hint: ") != std::string::npos;
    return make_error(ExitCode::kCorruptData, has_hint ? what : what + "." + kHint);
  }
  static std::string record_of(const PickledTensor& tensor) { return "data/" + tensor.record; }

  absl::Status expect_weights() {
    if (archive_.hasRecord("constants.pkl"))
      return damaged(std::string("is an archive of a module, as LibTorch or torch.jit writes it, and no "
                                 "dictionary of weights.") +
                     kHint);
    if (!archive_.hasRecord("data.pkl"))
      return damaged(std::string("has no data.pkl, as torch.save writes it.") + kHint);
    if (archive_.hasRecord("byteorder")) {
      const auto [bytes, size] = archive_.getRecord("byteorder");
      if (std::string_view(static_cast<const char*>(bytes.get()), size) != "little")
        return damaged("was written on a machine with another order of bytes");
    }
    return absl::OkStatus();
  }

  absl::StatusOr<PickledWeights> read_pickle() {
    const std::size_t size = archive_.getRecordSize("data.pkl");
    if (size > std::min(kMostPickleBytes, bytes_))
      return damaged("has a data.pkl that is larger than what weights need");
    const auto [bytes, read] = archive_.getRecord("data.pkl");
    auto pickled = read_weights_pickle({static_cast<const char*>(bytes.get()), read});
    if (pickled.ok()) return pickled;
    return damaged(
        "is not a file of weights (a dictionary from names to tensors, as torch.save writes it), or cut short: " +
        message_of(pickled.status()));
  }

  static absl::Status expect_tensors_only(const PickledWeights& pickled) {
    if (pickled.others.empty()) return absl::OkStatus();
    std::string list;
    for (std::size_t i = 0; i < std::min(pickled.others.size(), kMostOthers); ++i) list += "\n  " + pickled.others[i];
    if (pickled.others.size() > kMostOthers) list += c10::str("\n  and ", pickled.others.size() - kMostOthers, " more");
    return damaged("is not a file of weights (a dictionary from names to tensors, as torch.save writes it):" + list +
                   "\n" + kHint);
  }

  absl::Status compare(const std::string& name, const PickledTensor& tensor) {
    const std::optional<at::ScalarType> type = type_of(tensor.type);
    if (!type) return damaged(c10::str(name, ": elements of the type ", tensor.type, " are not known"));
    const auto element = static_cast<std::int64_t>(c10::elementSize(*type));
    std::int64_t wanted = tensor.storage_numel;
    if (wanted < 0 || __builtin_mul_overflow(wanted, tensor.is_untyped ? 1 : element, &wanted))
      return damaged(c10::str(name, ": a storage cannot have ", tensor.storage_numel, " elements"));
    const std::optional<std::int64_t> reach = reach_of(tensor);
    if (!reach || *reach > wanted / element)
      return damaged(c10::str(name, ": the tensor reaches beyond its storage ", tensor.record, " of ", wanted,
                              " bytes: sizes ", c10::str(at::IntArrayRef(tensor.sizes)), ", strides ",
                              c10::str(at::IntArrayRef(tensor.strides)), ", offset ", tensor.offset, ", ", element,
                              " bytes an element"));
    if (wanted == 0) return absl::OkStatus();
    const std::string record = record_of(tensor);
    if (!archive_.hasRecord(record)) return damaged(c10::str(name, ": its storage ", tensor.record, " is missing"));
    const std::size_t got = archive_.getRecordSize(record);
    if (got != static_cast<std::size_t>(wanted))
      return damaged(
          c10::str(name, ": its storage ", tensor.record, " wants ", wanted, " bytes, and the file has ", got));
    if (got > bytes_)
      return damaged(c10::str(name, ": its storage ", tensor.record, " has ", got, " bytes, more than the file"));
    return absl::OkStatus();
  }

  at::Tensor make(const PickledTensor& tensor) {
    const at::ScalarType type = *type_of(tensor.type);
    return at::empty({0}, at::TensorOptions(type)).set_(storage(tensor), tensor.offset, tensor.sizes, tensor.strides);
  }

  at::Storage storage(const PickledTensor& tensor) {
    if (tensor.storage_numel == 0) return at::empty({0}, at::TensorOptions(at::kByte)).storage();
    at::Storage& storage = storages_[tensor.record];
    if (storage) return storage;
    const std::string record = record_of(tensor);
    const std::size_t bytes = archive_.getRecordSize(record);
    const at::Tensor memory = at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte));
    archive_.getRecord(record, memory.mutable_data_ptr(), bytes);
    storage = memory.storage();
    return storage;
  }

  const std::size_t bytes_;
  caffe2::serialize::PyTorchStreamReader archive_;
  std::map<std::string, at::Storage> storages_;
};

absl::Status of_file(const std::filesystem::path& path, const std::string& what) {
  return make_error(ExitCode::kCorruptData, std::string(kKind) + " " + path.string() + " " + what);
}

absl::Status no_memory(const std::filesystem::path& path) {
  return make_error(ExitCode::kOsResource, std::string(kKind) + " " + path.string() +
                                               " cannot be read: out of memory. " + limit_hint(ENOMEM));
}

absl::Status no_archive(const std::filesystem::path& path, const std::string& why) {
  if (limit_in(why) == ENOMEM) return no_memory(path);
  // What LibTorch says behind that is of itself ("This is an internal miniz error").
  const std::string first = why.substr(0, std::min(why.find('\n'), why.find(". This is ")));
  return of_file(path, "is no zip archive of torch.save, or cut short: " + first + "." + kHint);
}

}  // namespace

absl::StatusOr<std::vector<std::pair<std::string, at::Tensor>>> read_weights(const std::filesystem::path& path) {
  TESSERA_ASSIGN_OR_RETURN(InputFile file, InputFile::open(path, kKind));
  try {
    auto weights = WeightsFile(std::move(file)).read();
    if (!weights.ok()) return of_file(path, message_of(weights.status()));
    return weights;
  } catch (const std::bad_alloc&) {
    return no_memory(path);
  } catch (const c10::Error& error) {  // of the archive's reader
    return no_archive(path, error.what_without_backtrace());
  } catch (const std::exception& error) {
    return no_archive(path, error.what());
  }
}

}  // namespace tessera
