#include "engine/weights/weights_kind.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "engine/weights/little_endian.h"

namespace tessera {
namespace {

using std::string_view_literals::operator""sv;

constexpr std::string_view kSaveAgain =
    "[T0318] hint: in Python, torch.save(torch.load(path, weights_only=True), new_path) writes it as an archive";
constexpr std::string_view kUnpack = "[T0319] hint: unpack it, and name a file of weights that is in it";
constexpr std::string_view kFromArrays =
    "[T0320] hint: read its arrays in Python, and write torch.save({name: torch.from_numpy(array)}, path) under the "
    "model's names";

struct Beginning {
  std::size_t place;
  std::string_view bytes;
  FileKind kind;
};

// A pickle of the old torch.save has a magic number of 10 bytes near its beginning. The number comes after the pickle's
// version, and from version 4 on also after a frame's length.
constexpr std::string_view kOldMagic = "\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"sv;
constexpr FileKind kOldPickle{"is a pickle of a PyTorch before 1.6, or of _use_new_zipfile_serialization=False",
                              kSaveAgain};

// The first entry that fits is used.
constexpr Beginning kBeginnings[] = {
    {0,
     "version https://git-lfs"sv,
     {"is a pointer of Git LFS, which stands for the file", "[T0321] hint: git lfs pull puts the file in its place"}},
    {2, kOldMagic, kOldPickle},
    {11, kOldMagic, kOldPickle},
    {257,
     "ustar"sv,
     {"is a tar archive", "[T0322] hint: unpack it with tar -xf, and name a file of weights that is in it"}},
    {0, "\x1f\x8b"sv, {"is compressed by gzip", "[T0323] hint: unpack it with gunzip or tar -xzf"}},
    {0, "BZh"sv, {"is compressed by bzip2", "[T0324] hint: unpack it with bunzip2 or tar -xjf"}},
    {0, "\xfd\x37zXZ\x00"sv, {"is compressed by xz", "[T0325] hint: unpack it with unxz or tar -xJf"}},
    {0, "\x28\xb5\x2f\xfd"sv, {"is compressed by zstd", "[T0326] hint: unpack it with unzstd"}},
    {0, "7z\xbc\xaf\x27\x1c"sv, {"is an archive of 7-Zip", kUnpack}},
    {0, "Rar!\x1a\x07"sv, {"is an archive of RAR", kUnpack}},
    {0, "\x89HDF\r\n\x1a\n"sv, {"is an HDF5 file, as Keras and h5py write it", kFromArrays}},
    {512, "\x89HDF\r\n\x1a\n"sv, {"is an HDF5 file, as Keras and h5py write it", kFromArrays}},
    {0, "\x93NUMPY"sv, {"is one array of numpy", kFromArrays}},
    {0,
     "GGUF"sv,
     {"is a GGUF file of llama.cpp",
      "[T0327] hint: take the safetensors that it was made of; its values are mostly quantised"}},
    {0,
     "lmgg"sv,
     {"is a GGML file of llama.cpp",
      "[T0328] hint: take the safetensors that it was made of; its values are mostly quantised"}},
    {0,
     "tjgg"sv,
     {"is a GGML file of llama.cpp",
      "[T0329] hint: take the safetensors that it was made of; its values are mostly quantised"}},
    {4, "TFL3"sv, {"is a model of TensorFlow Lite", kFromArrays}},
    {4,
     "PTMF"sv,
     {"is a TorchScript program for mobile devices",
      "[T0330] hint: in Python, torch.save(torch.jit.load(path).state_dict(), new_path) writes its weights"}},
    {0,
     "\x7f"
     "ELF"sv,
     {"is a program or a library, as AOTInductor compiles them",
      "[T0331] hint: name the weights that it was compiled with"}},
};

bool has_at(std::string_view beginning, std::size_t place, std::string_view bytes) {
  return beginning.size() >= place && beginning.substr(place).starts_with(bytes);
}

std::string lower(std::string_view text) {
  std::string all(text);
  std::ranges::transform(all, all.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return all;
}

std::string_view without_spaces(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r\n\f");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin);
}

bool is_web_page(std::string_view text) {
  const std::string start = lower(text.substr(0, 16));
  return start.starts_with("<!doctype html") || start.starts_with("<html") || start.starts_with("<head");
}

bool is_text(std::string_view beginning) {
  return std::ranges::none_of(beginning, [](unsigned char c) { return c < 0x20 && !std::isspace(c); });
}

/// Returns whether the file begins like a model in ONNX. Such a file is a protobuf message with field 1 (ir_version),
/// followed by field 2 (the producer's name) or field 7 (the graph).
bool is_onnx(std::string_view beginning) {
  return beginning.size() > 3 && beginning[0] == 0x08 && beginning[1] > 0 && beginning[1] < 0x20 &&
         (beginning[2] == 0x12 || beginning[2] == 0x3a);
}

bool any_ends_with(const std::vector<std::string>& names, std::initializer_list<std::string_view> ends) {
  return std::ranges::any_of(names, [&](const std::string& name) {
    return std::ranges::any_of(ends, [&](std::string_view end) { return name.ends_with(end); });
  });
}

std::uint64_t number_at(const char* bytes, std::size_t count) { return little_endian({bytes, count}); }

/// The position and size of a zip archive's directory, as the record at the archive's end says.
struct ZipDirectory {
  std::uint64_t place = 0, bytes = 0;
};

std::optional<ZipDirectory> directory_of_zip(const ReadBytes& read, std::uint64_t bytes) {
  constexpr std::size_t kEndBytes = 22, kLongestComment = 0xffff, kLocatorBytes = 20, kEnd64Bytes = 56;
  if (bytes < kEndBytes) return std::nullopt;
  std::string tail(std::min<std::uint64_t>(bytes, kEndBytes + kLongestComment), '\0');
  const std::uint64_t tail_place = bytes - tail.size();
  if (!read(tail_place, tail.size(), tail.data())) return std::nullopt;
  const std::size_t found = tail.rfind("PK\x05\x06", tail.size() - kEndBytes);
  if (found == std::string::npos) return std::nullopt;
  ZipDirectory directory{number_at(&tail[found + 16], 4), number_at(&tail[found + 12], 4)};
  const std::uint64_t end = tail_place + found;
  // Zip64 has the directory's position and size in another record; a third record, just before the end record, points
  // to that record.
  std::array<char, kEnd64Bytes> record{};
  if (end >= kLocatorBytes && read(end - kLocatorBytes, kLocatorBytes, record.data()) &&
      std::string_view(record.data(), 4) == "PK\x06\x07") {
    const std::uint64_t place = number_at(&record[8], 8);
    if (place > bytes || !read(place, record.size(), record.data()) ||
        std::string_view(record.data(), 4) != "PK\x06\x06")
      return std::nullopt;
    directory = {number_at(&record[48], 8), number_at(&record[40], 8)};
  }
  if (directory.place > bytes || directory.bytes > bytes - directory.place) return std::nullopt;
  return directory;
}

}  // namespace

FileKind kind_of_beginning(std::string_view beginning) {
  if (beginning.empty())
    return {"is empty", "[T0332] hint: write it again: the program that did was stopped, or the disk was full"};
  for (const Beginning& each : kBeginnings) {
    if (has_at(beginning, each.place, each.bytes)) return each.kind;
  }
  if (beginning.size() > 1 && beginning[0] == '\x80' && beginning[1] > 0 && beginning[1] < 6)
    return {"is a pickle that torch.save did not write",
            "[T0333] hint: load it with the program that wrote it, and write torch.save(tensors_by_name, path)"};
  const std::string_view text = without_spaces(beginning);
  if (is_web_page(text))
    return {"is a web page",
            "[T0334] hint: download the file itself: of Hugging Face, its address says resolve and not blob"};
  if (is_onnx(beginning)) return {"is a model in ONNX", kFromArrays};
  if (!is_text(beginning))
    return {"is of no kind that is known here",
            "[T0335] hint: files of weights are those of PyTorch's save in Python or C++, those of save_weights, and "
            "safetensors"};
  if (text.starts_with('{') || text.starts_with('['))
    return {"is a text in JSON, and no index of a model in several files",
            "[T0336] hint: name the file of weights, or a model's *.index.json"};
  return {"is a text", "[T0337] hint: name the file of weights"};
}

FileKind kind_of_zip(const std::vector<std::string>& names) {
  if (any_ends_with(names, {".npy"})) return {"is a file of numpy.savez", kFromArrays};
  if (any_ends_with(names, {"model.weights.h5"})) return {"is a model of Keras", kFromArrays};
  if (any_ends_with(names, {"archive_format", "serialized_exported_program.json"}))
    return {"is a program of torch.export",
            "[T0338] hint: in Python, torch.save(torch.export.load(path).state_dict, new_path) writes its weights"};
  if (any_ends_with(names, {"/model.json"}))
    return {"is a TorchScript program of a PyTorch before 1.4",
            "[T0339] hint: in Python, torch.save(torch.jit.load(path).state_dict(), new_path) writes its weights"};
  if (any_ends_with(names, {".data/extern_modules"}))
    return {"is an archive of torch.package",
            "[T0340] hint: in Python, load the module with PackageImporter, and write torch.save(module.state_dict(), "
            "path)"};
  if (any_ends_with(names, {".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".h5", ".onnx", ".gguf"}))
    return {"is a zip archive with files of weights in it", "[T0341] hint: unpack it with unzip, and name one of them"};
  return {"is a zip archive that torch.save did not write", kUnpack};
}

std::optional<std::vector<std::string>> names_in_zip(const ReadBytes& read, std::uint64_t bytes) {
  constexpr std::uint64_t kMostBytes = std::uint64_t{16} << 20;
  constexpr std::size_t kHeadBytes = 46;
  const std::optional<ZipDirectory> directory = directory_of_zip(read, bytes);
  if (!directory) return std::nullopt;
  std::string text(std::min(directory->bytes, kMostBytes), '\0');
  if (!read(directory->place, text.size(), text.data())) return std::nullopt;
  std::vector<std::string> names;
  for (std::size_t place = 0; names.size() < kMostZipNames && place + kHeadBytes <= text.size();) {
    if (!std::string_view(text).substr(place).starts_with("PK\x01\x02")) return std::nullopt;
    const std::size_t name = number_at(&text[place + 28], 2);
    const std::size_t rest = number_at(&text[place + 30], 2) + number_at(&text[place + 32], 2);
    names.push_back(text.substr(place + kHeadBytes, name));
    place += kHeadBytes + name + rest;
  }
  return names;
}

}  // namespace tessera
