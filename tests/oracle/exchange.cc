#include "tests/oracle/exchange.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"

namespace tessera::oracle {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little, "the exchange format is little-endian, and so must be we");

absl::StatusOr<std::string> dtype_name(const std::string& name, const at::Tensor& tensor) {
  if (tensor.scalar_type() == at::kFloat) return std::string("float32");
  if (tensor.scalar_type() == at::kLong) return std::string("int64");
  return make_error(ExitCode::kInternal,
                    "exchange: " + name + " wants fp32 or int64, got " + c10::toString(tensor.scalar_type()));
}

absl::Status write_bytes(const std::filesystem::path& path, const void* bytes, std::size_t size) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(size));
  file.close();
  if (!file) return make_error(ExitCode::kIo, "exchange: cannot write " + path.string());
  return absl::OkStatus();
}

absl::StatusOr<at::Tensor> read_tensor(const std::filesystem::path& folder, const json& entry) {
  const std::string dtype = entry.at("dtype");
  if (dtype != "float32" && dtype != "int64") {
    return make_error(ExitCode::kCorruptData, "exchange: dtype wants float32 or int64, got " + dtype);
  }
  const auto shape = entry.at("shape").get<std::vector<std::int64_t>>();
  at::Tensor tensor = at::empty(shape, dtype == "int64" ? at::kLong : at::kFloat);
  const std::filesystem::path path = folder / entry.at("file").get<std::string>();
  std::ifstream file(path, std::ios::binary);
  file.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  const bool complete = file && file.peek() == std::ifstream::traits_type::eof();
  if (!complete) {
    return make_error(ExitCode::kCorruptData,
                      "exchange: " + path.string() + " wants " + std::to_string(tensor.nbytes()) + " bytes");
  }
  return tensor;
}

}  // namespace

absl::Status write_tensors(const std::filesystem::path& folder, const NamedTensors& tensors) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  json index = json::array();
  for (const auto& [name, tensor] : tensors) {
    TESSERA_ASSIGN_OR_RETURN(const std::string dtype, dtype_name(name, tensor));
    const std::string file = std::to_string(index.size()) + ".bin";
    const at::Tensor flat = tensor.detach().cpu().contiguous();
    TESSERA_RETURN_IF_ERROR(write_bytes(folder / file, flat.data_ptr(), flat.nbytes()));
    index.push_back({{"name", name}, {"dtype", dtype}, {"shape", tensor.sizes().vec()}, {"file", file}});
  }
  const std::string text = index.dump(1);
  return write_bytes(folder / "index.json", text.data(), text.size());
}

absl::StatusOr<NamedTensors> read_tensors(const std::filesystem::path& folder) {
  std::ifstream file(folder / "index.json");
  if (!file) return make_error(ExitCode::kNoInput, "exchange: no " + (folder / "index.json").string());
  NamedTensors tensors;
  try {
    for (const json& entry : json::parse(file)) {
      TESSERA_ASSIGN_OR_RETURN(at::Tensor tensor, read_tensor(folder, entry));
      tensors.emplace_back(entry.at("name").get<std::string>(), std::move(tensor));
    }
  } catch (const json::exception& error) {
    return make_error(ExitCode::kCorruptData, "exchange: " + (folder / "index.json").string() + ": " + error.what());
  }
  return tensors;
}

}  // namespace tessera::oracle
