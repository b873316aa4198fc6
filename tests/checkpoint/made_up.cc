#include "tests/checkpoint/made_up.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <utility>

#include "checkpoint/files/hash.h"
#include "checkpoint/manifest_line.h"
#include "checkpoint/saved_checkpoint.h"
#include "checkpoint/shard_writer.h"

namespace tessera {

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_content(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::vector<std::byte> made_up_bytes(const Piece& piece, std::uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<std::size_t>(piece.bytes()));
  const std::uint64_t key = checkpoint_hash(piece.what + "|" + piece.name) ^ (seed * 0xd6e8feb86659fd93u);
  const std::int64_t first = piece.offset * element_bytes(piece.dtype);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>((key + 0x9e3779b97f4a7c15u * (static_cast<std::uint64_t>(first) + i)) >> 40);
  }
  return bytes;
}

SavedFile write_made_up(const std::string& folder, const std::string& name, std::vector<Piece> pieces,
                        std::uint64_t seed) {
  ShardHeader header{std::move(pieces)};
  place_pieces(header.pieces);
  auto writer = ShardWriter::create(folder, name, header, "rank 0");
  EXPECT_TRUE(writer.ok()) << writer.status();
  for (const Piece& piece : header.pieces) EXPECT_TRUE((*writer)->append(made_up_bytes(piece, seed)).ok());
  auto file = (*writer)->finish();
  EXPECT_TRUE(file.ok()) << file.status();
  return *file;
}

Manifest write_made_up_files(const std::string& folder, std::uint64_t seed) {
  Manifest manifest;
  manifest.written_by = "tessera 0.0.0";
  manifest.step = 12;
  manifest.progress.steps_applied = 11;
  manifest.progress.samples_seen = 704;
  manifest.ranks = manifest.shard = 2;
  manifest.strategy = R"({"strategy": "FULL_SHARD"})";
  manifest.states = {{"exp_avg", "bf16"}, {"exp_avg_sq", "8bit"}};
  manifest.units = {"(root)", "blocks.0"};
  manifest.parameters = {{"a.weight", {"head"}, {700, 512}, {}, "BF16", true, 11, 0, 0, 0},
                         {"odd|name \"quoted\"", {}, {300}, {}, "F32", true, 9, 1, 0, 256},
                         {"frozen", {}, {5, 3}, {1, 5}, "F16", false, 0, 1, 1, 0},
                         {"none", {}, {0, 4}, {}, "F32", true, 11, 1, 0, 1024}};
  SavedParameter& frozen = manifest.parameters[2];  // this parameter trained before it was frozen
  frozen.states = {"exp_avg", "exp_avg_sq"};
  frozen.updates = 7;
  frozen.keeps_master = true;
  manifest.buffers = {{"running_mean", "F32", {7}, {1}}, {"count", "I64", {}, {}}};
  manifest.items = {{"table", "BOOL", {2, 2}, {}}};
  manifest.json_items = {{"best", R"({"loss": 1.5})"}};
  manifest.generators = 2;
  manifest.progress.loss_scale = SavedLossScale{1024.5, 3, 1};
  manifest.progress.rates = {1e-3, std::nullopt, 0.1 + 0.2};
  manifest.progress.options = {{{"eps", 0.1 + 0.2}}, {}};
  manifest.progress.losses = SavedLosses{{2.5, 0.1 + 0.2, 0}, 1};
  manifest.progress.noise_scale = SavedNoiseScale{-0.1 - 0.2, 7.5, 0.875, 64};
  manifest.residuals = SavedResiduals{3, 0.9};
  manifest.processor = SavedProcessor{4, "AVX2", "avx512", "NVIDIA H200"};
  manifest.data = SamplerCursor{1, 4000, 5000, 0xfedcba9876543210u, true};
  std::vector<Piece> first, second;
  const auto both = [&](const std::string& what, const std::string& name, const std::string& dtype, std::int64_t numel,
                        std::int64_t cut) {
    first.push_back({what, name, dtype, 0, cut});
    if (cut < numel) second.push_back({what, name, dtype, cut, numel - cut});
  };
  for (const auto& [name, numel, cut] :
       {std::tuple("a.weight", 700 * 512, 100 * 512), {"odd|name \"quoted\"", 300, 256}}) {
    both(kMaster, name, "F32", numel, cut);
    both("exp_avg", name, "BF16", numel, cut);
    both("exp_avg_sq", name, "U8", numel, cut);
    both(std::string("exp_avg_sq") + kScales, name, "F32", (numel + 255) / 256, cut / 256);
  }
  both(kValue, "frozen", "F16", 15, 15);
  both(kMaster, "frozen", "F32", 15, 15);
  both("exp_avg", "frozen", "BF16", 15, 15);
  both("exp_avg_sq", "frozen", "U8", 15, 15);
  both(std::string("exp_avg_sq") + kScales, "frozen", "F32", 1, 1);
  const std::string odd = "odd|name \"quoted\"";
  first.push_back({of_rank(kResidual, 0), odd, "F32", 10, 200});
  first.push_back({kFactors, odd, "F32", 0, 12});
  second.push_back({of_rank(kResidual, 1), odd, "F32", 0, 100});
  second.push_back({of_rank(kResidual, 1), odd, "F32", 150, 150});
  second.push_back({of_rank(kReplicaResidual, 1), odd, "F32", 5, 7});
  first.push_back({kBuffer, "running_mean", "F32", 0, 7});
  first.push_back({kBuffer, "count", "I64", 0, 1});
  first.push_back({kItem, "table", "BOOL", 0, 4});
  first.push_back({kGenerator, "0", "U8", 0, 77});
  second.push_back({buffer_of_rank(1), "running_mean", "F32", 0, 7});
  second.push_back({kGenerator, "1", "U8", 0, 77});
  manifest.files = {write_made_up(folder, "rank-00000.safetensors", first, seed),
                    write_made_up(folder, "rank-00001.safetensors", second, seed)};
  return manifest;
}

std::string write_made_up_checkpoint(const std::string& folder, std::uint64_t seed) {
  const std::string text = write_manifest(write_made_up_files(folder, seed));
  write_content(folder + "/manifest.json", text);
  return text;
}

std::string changed_manifest(const std::string& text, const std::string& from, const std::string& to) {
  std::string lines = text.substr(text.find('\n') + 1);
  const std::size_t at = lines.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  lines.replace(at, from.size(), to);
  return manifest_line(Manifest::kVersion, checkpoint_hash(lines)) + lines;
}

std::string head_of(const std::string& json) {
  const std::uint64_t length = json.size();
  std::string head(8, '\0');
  std::memcpy(head.data(), &length, 8);
  return head + json;
}

}  // namespace tessera
