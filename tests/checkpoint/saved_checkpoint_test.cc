// Tests whole, damaged and hostile checkpoints on disk: either the data that are read are right, or an error says where
// the damage is.

#include "checkpoint/saved_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>

#include "checkpoint/files/hash.h"
#include "checkpoint/shard_writer.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

/// Opens a checkpoint and reads all of it.
absl::Status read_all(const std::string& folder) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<SavedCheckpoint> checkpoint, SavedCheckpoint::open(folder, "rank 1"));
  for (std::int64_t chunk = 0; chunk < checkpoint->chunks(); ++chunk)
    TESSERA_RETURN_IF_ERROR(checkpoint->verify(chunk));
  return absl::OkStatus();
}

struct Tensor {
  std::string what, name, dtype;
  std::int64_t numel;
};
const Tensor kTensors[] = {{kMaster, "a.weight", "F32", 700 * 512},
                           {"exp_avg", "a.weight", "BF16", 700 * 512},
                           {"exp_avg_sq", "a.weight", "U8", 700 * 512},
                           {"exp_avg_sq.scales", "a.weight", "F32", 1400},
                           {kMaster, "odd|name \"quoted\"", "F32", 300},
                           {kValue, "frozen", "F16", 15},
                           {kMaster, "frozen", "F32", 15},
                           {"exp_avg", "frozen", "BF16", 15},
                           {"buffer.rank1", "running_mean", "F32", 7},
                           {kGenerator, "1", "U8", 77}};

TEST(SavedCheckpoint, EveryElementComesBackWhereverItIsRead) {
  const ScratchFolder folder;
  write_made_up_checkpoint(folder.path());
  auto checkpoint = SavedCheckpoint::open(folder.path(), "rank 0");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const Tensor& tensor : kTensors) {
    const auto wanted = made_up_bytes({tensor.what, tensor.name, tensor.dtype, 0, tensor.numel}, 1);
    const std::int64_t size = element_bytes(tensor.dtype);
    for (const std::int64_t first : {std::int64_t{0}, tensor.numel / 7, tensor.numel / 2, tensor.numel - 1}) {
      for (const std::int64_t count : {std::int64_t{1}, tensor.numel / 3, tensor.numel - first}) {
        if (first + count > tensor.numel) continue;
        std::vector<std::byte> got(static_cast<std::size_t>(count * size));
        const absl::Status status = (*checkpoint)->read(tensor.what, tensor.name, first, got);
        ASSERT_TRUE(status.ok()) << status;
        EXPECT_TRUE(std::equal(got.begin(), got.end(), wanted.begin() + first * size)) << tensor.what << " " << first;
      }
    }
  }
  std::vector<std::byte> beyond(8);
  EXPECT_FALSE((*checkpoint)->read(kMaster, "a.weight", 700 * 512 - 1, beyond).ok());
  EXPECT_FALSE((*checkpoint)->read(kMaster, "no such", 0, beyond).ok());
}

void expect_refused(const std::string& folder, const std::string& what, const ::testing::Matcher<std::string>& text,
                    ExitCode code = ExitCode::kCorruptData) {
  const absl::Status status = read_all(folder);
  ASSERT_FALSE(status.ok()) << what;
  EXPECT_EQ(exit_code_of(status), code) << what << ": " << status;
  EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1: "), HasSubstr(folder), text)) << what;
}

// Fault F30 (docs/faults.md): the test flips bits in every byte of the headers, and in bytes of every chunk.
TEST(SavedCheckpoint, EveryFlippedBitIsNoticed) {
  const ScratchFolder folder;
  write_made_up_checkpoint(folder.path());
  ASSERT_TRUE(read_all(folder.path()).ok());
  for (const char* name : {"rank-00000.safetensors", "rank-00001.safetensors"}) {
    const std::string path = folder.file(name), bytes = content_of(path);
    std::uint64_t header = 0;
    std::memcpy(&header, bytes.data(), 8);
    header += 8;
    std::vector<std::size_t> places;
    for (std::size_t i = 0; i < header; ++i) places.push_back(i);
    for (std::size_t i = header; i < bytes.size(); i += 100003) places.push_back(i);
    for (std::size_t chunk = header; chunk < bytes.size(); chunk += SavedFile::kChunkBytes) places.push_back(chunk);
    places.push_back(bytes.size() - 1);
    for (const std::size_t place : places) {
      std::string changed = bytes;
      changed[place] = static_cast<char>(changed[place] ^ (1 << (place % 8)));
      write_content(path, changed);
      const bool in_header = place < header;
      const std::size_t chunk =
          in_header ? 0 : header + (place - header) / SavedFile::kChunkBytes * SavedFile::kChunkBytes;
      expect_refused(folder.path(), std::string(name) + " byte " + std::to_string(place),
                     AllOf(HasSubstr(name), HasSubstr("offset " + std::to_string(chunk)), HasSubstr("damaged"),
                           HasSubstr(in_header ? "header" : "They hold ")));
    }
    write_content(path, bytes);
  }
  EXPECT_TRUE(read_all(folder.path()).ok());
}

TEST(SavedCheckpoint, DamagedChunkIsNamedByItsParameter) {
  const ScratchFolder folder;
  write_made_up_checkpoint(folder.path());
  std::string bytes = content_of(folder.file("rank-00001.safetensors"));
  bytes.back() ^= 1;  // the data of type U8 lie at the end
  write_content(folder.file("rank-00001.safetensors"), bytes);
  expect_refused(folder.path(), "last byte", AllOf(HasSubstr("exp_avg_sq of \"a.weight\" (elements 51200 to 358399)")));
}

// This test covers faults F31 and F32 (docs/faults.md).
TEST(SavedCheckpoint, MissingCutLongerAndForeignFilesAreNoticed) {
  const ScratchFolder folder, other;
  write_made_up_checkpoint(folder.path());
  const std::string path = folder.file("rank-00000.safetensors"), bytes = content_of(path);
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{4}, std::size_t{100}, bytes.size() / 2, bytes.size() - 1}) {
    write_content(path, bytes.substr(0, size));
    expect_refused(folder.path(), "cut", HasSubstr("the manifest wants " + std::to_string(bytes.size())));
  }
  write_content(path, bytes + "x");
  expect_refused(folder.path(), "longer", HasSubstr("the manifest wants"));
  write_content(path, content_of(folder.file("rank-00001.safetensors")));
  expect_refused(folder.path(), "swapped", HasSubstr("rank-00000.safetensors"));
  ::unlink(path.c_str());
  expect_refused(folder.path(), "missing", HasSubstr("rank-00000.safetensors"), ExitCode::kNoInput);
  // The file of another step has the same name.
  write_made_up_files(other.path(), 2);
  std::filesystem::copy_file(other.file("rank-00000.safetensors"), path);
  expect_refused(folder.path(), "of another step", HasSubstr("damaged"));
  write_content(path, bytes);
  ASSERT_TRUE(read_all(folder.path()).ok());
  ::unlink(folder.file("manifest.json").c_str());
  expect_refused(folder.path(), "no manifest", HasSubstr("manifest.json"), ExitCode::kNoInput);
}

// Fault F37 (docs/faults.md): only regular files of the folder are opened, and no reader waits for a pipe.
TEST(SavedCheckpoint, LinksPipesAndFoldersAreNotOpened) {
  const ScratchFolder folder, other;
  write_made_up_checkpoint(folder.path());
  for (const char* name : {"rank-00000.safetensors", "manifest.json"}) {
    const std::string path = folder.file(name), bytes = content_of(path);
    std::filesystem::rename(path, other.file(name));
    std::filesystem::create_symlink(other.file(name), path);
    expect_refused(folder.path(), "link", HasSubstr("is a link"));
    ::unlink(path.c_str());
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    expect_refused(folder.path(), "pipe", HasSubstr("no regular file"));
    ::unlink(path.c_str());
    std::filesystem::create_directory(path);
    expect_refused(folder.path(), "folder", HasSubstr("no regular file"));
    std::filesystem::remove(path);
    write_content(path, bytes);
  }
  ASSERT_TRUE(read_all(folder.path()).ok());
}

// The folder of checkpoints itself may be a link, since the user chose it. No file in it may be a link.
TEST(SavedCheckpoint, LinksBelowTheCheckpointsFolderAreRefused) {
  const ScratchFolder folder, other;
  const std::string name = "step-000000000004", step = folder.file(name);
  std::filesystem::create_directory(step);
  write_made_up_checkpoint(step);
  std::filesystem::create_symlink(folder.path(), other.file("link"));
  EXPECT_TRUE(read_all(other.file("link/" + name)).ok());
  std::filesystem::rename(step, other.file("moved"));
  EXPECT_TRUE(read_all(other.file("moved")).ok());
  std::filesystem::create_symlink(other.file("moved"), step);
  expect_refused(step, "a checkpoint that is a link", HasSubstr(step + " is a link"));
  EXPECT_THAT(message_of(read_all(step + "/")), HasSubstr(step + " is a link"));
  std::filesystem::create_symlink(other.file("moved"), other.file("named-by-its-user"));
  EXPECT_TRUE(read_all(other.file("named-by-its-user")).ok());
}

// A hostile writer may give wrong pieces the right hashes.
TEST(SavedCheckpoint, PiecesThatMissOrRepeatATensorAreRefused) {
  const auto with = [](std::vector<Piece> first, std::vector<Piece> second, const std::string& what, const char* text) {
    const ScratchFolder folder;
    Manifest manifest;
    manifest.ranks = manifest.shard = 2;
    manifest.parameters = {{"w", {}, {600}, {}, "F32", true}, {"f", {}, {2}, {}, "F16", false}};
    manifest.states = {{"m", "8bit"}};
    manifest.files = {write_made_up(folder.path(), "a", std::move(first), 1),
                      write_made_up(folder.path(), "b", std::move(second), 1)};
    write_content(folder.file("manifest.json"), write_manifest(manifest));
    const absl::Status status = read_all(folder.path());
    EXPECT_EQ(status.ok(), std::string(text).empty()) << what << status;
    EXPECT_THAT(message_of(status), HasSubstr(text)) << what;
  };
  const Piece w0{"master", "w", "F32", 0, 256}, w1{"master", "w", "F32", 256, 344}, m0{"m", "w", "U8", 0, 512},
      m1{"m", "w", "U8", 512, 88}, s0{"m.scales", "w", "F32", 0, 2}, s1{"m.scales", "w", "F32", 2, 1},
      f{"value", "f", "F16", 0, 2};
  with({w0, m0, s0, f}, {w1, m1, s1}, "whole", "");
  with({w0, m0, s0, f}, {m1, s1}, "the end is missing", "the files have 256 elements, wanted 600");
  with({w1, m0, s0, f}, {m1, s1}, "the begin is missing", "pieces are missing");
  with({w0, m0, s0, f}, {{"master", "w", "F32", 255, 345}, m1, s1}, "overlap", "overlap");
  with({w0, m0, s0, f}, {{"master", "w", "F32", 256, 345}, m1, s1}, "too long", "have 601 elements, wanted 600");
  with({w0, m0, s0, f}, {w0, w1, m1, s1}, "twice", "overlap");
  with({w0, m0, s0, f}, {{"master", "w", "F16", 256, 344}, m1, s1}, "another type", "has the type F16, wanted F32");
  with({w0, m0, s0, f}, {w1, m1}, "a scale is missing", "m.scales");
  with({w0, m0, s0}, {w1, m1, s1}, "a parameter is missing", "value of \"f\"");
  with({w0, m0, s0, f, {"master", "x", "F32", 0, 1}}, {w1, m1, s1}, "one too many", "the manifest knows nothing");
  with({w0, m0, s0, f, {"buffer.rank1", "x", "F32", 0, 1}}, {w1, m1, s1}, "one too many", "the manifest knows nothing");
}

// Residuals of a rank need not cover a parameter, but must be a part of a parameter that trains.
TEST(SavedCheckpoint, ResidualsOutsideTrainedParametersAreRefused) {
  const auto with = [](const std::vector<Piece>& pieces, bool has_residuals, const char* text) {
    const ScratchFolder folder;
    Manifest manifest;
    manifest.ranks = manifest.shard = 2;
    manifest.parameters = {{"w", {}, {600}, {}, "F32", true}, {"f", {}, {2}, {}, "F16", false}};
    if (has_residuals) manifest.residuals = SavedResiduals{};
    std::vector<Piece> all = {{kMaster, "w", "F32", 0, 600}, {kValue, "f", "F16", 0, 2}};
    all.insert(all.end(), pieces.begin(), pieces.end());
    manifest.files = {write_made_up(folder.path(), "a", std::move(all), 1)};
    write_content(folder.file("manifest.json"), write_manifest(manifest));
    const absl::Status status = read_all(folder.path());
    EXPECT_EQ(status.ok(), std::string(text).empty()) << status;
    EXPECT_THAT(message_of(status), HasSubstr(text));
  };
  const Piece own{of_rank(kResidual, 1), "w", "F32", 100, 300};
  with({own, {of_rank(kResidual, 1), "w", "F32", 500, 100}, {of_rank(kReplicaResidual, 0), "w", "F32", 0, 600}}, true,
       "");
  with({own}, false, "the manifest knows nothing");
  with({own, {of_rank(kResidual, 1), "w", "F32", 399, 1}}, true, "has elements 399 to 399 of residual.rank1 of \"w\"");
  with({own, {of_rank(kResidual, 1), "w", "F32", 500, 101}}, true, "wanted F32 and elements from 400 to 599");
  with({{of_rank(kResidual, 1), "w", "F32", std::int64_t{1} << 40, 1}}, true, "wanted F32 and elements from 0 to 599");
  with({{of_rank(kResidual, 1), "w", "BF16", 0, 10}}, true, "as BF16");
  with({{of_rank(kResidual, 2), "w", "F32", 0, 600}}, true, "the manifest knows nothing");
  with({{of_rank(kResidual, 0), "f", "F32", 0, 2}}, true, "the manifest knows nothing");
  with({{kFactors, "f", "F32", 0, 2}}, true, "the manifest knows nothing");
  with({{kFactors, "w", "F16", 0, 2}}, true, "as F16");
}

// Fault F24 (docs/faults.md): a failed read is an error that names the file and the offset. A short read is continued.
TEST(SavedCheckpoint, EveryFailedReadIsAnError) {
  const ScratchFolder folder;
  write_made_up_checkpoint(folder.path());
  for (const FaultRule& kind : {FaultRule{.site = FaultSite::kRead, .action = FaultAction::kErrno, .number = EIO},
                                FaultRule{.site = FaultSite::kOpen, .action = FaultAction::kErrno, .number = EIO},
                                FaultRule{.site = FaultSite::kOpen, .action = FaultAction::kErrno, .number = EMFILE},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kBitFlip, .number = 3},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kTorn, .number = 0},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kShort, .number = 0},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kShort, .number = 5},
                                FaultRule{.site = FaultSite::kRead, .action = FaultAction::kErrno, .number = EINTR}}) {
    const bool is_transparent = (kind.action == FaultAction::kShort && kind.number > 0) || kind.number == EINTR;
    std::int64_t n = 1;
    for (;; ++n) {
      FaultRule rule = kind;
      rule.nth = n;
      ScopedFaults faults({rule});
      const absl::Status status = read_all(folder.path());
      if (faults.plan().faults() == 0) {
        EXPECT_TRUE(status.ok());
        break;
      }
      EXPECT_EQ(status.ok(), is_transparent) << n << status;
      if (status.ok()) continue;
      EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 1: "), HasSubstr(folder.path())));
    }
    EXPECT_GT(n, 3);
  }
}

// Faults F22 and F23 (docs/faults.md): writes to the files of a rank fail.
TEST(SavedCheckpoint, EveryFailedWriteIsAnError) {
  for (const FaultSite site : {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync}) {
    for (const int error : {EIO, ENOSPC}) {
      std::int64_t n = 1;
      for (;; ++n) {
        const ScratchFolder folder;
        ScopedFaults faults({{.site = site, .nth = n, .action = FaultAction::kErrno, .number = error}});
        ShardHeader header{{{"master", "w", "F32", 0, 3000000}}};  // the data are two blocks and a piece of a third
        auto writer = ShardWriter::create(folder.path(), "a", header, "rank 3");
        absl::Status status = writer.status();
        if (status.ok()) status = (*writer)->append(made_up_bytes(header.pieces[0], 1));
        if (status.ok()) status = (*writer)->finish().status();
        if (faults.plan().faults() == 0) {
          EXPECT_TRUE(status.ok());
          break;
        }
        ASSERT_FALSE(status.ok());
        EXPECT_THAT(message_of(status), AllOf(HasSubstr("rank 3: "), HasSubstr(folder.file("a")),
                                              HasSubstr("(errno " + std::to_string(error) + ")")));
      }
      EXPECT_GT(n, site == FaultSite::kWrite ? 3 : 1);
    }
  }
}

// Portions end near the edges of chunks, and of the blocks that are written past the page cache. The second file system
// is in memory (if there is /dev/shm), and may not support such writes.
TEST(SavedCheckpoint, FileHoldsTheBytesAppendedInAnyPortions) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  std::mt19937 random(5);
  const ScratchFolder folder;
  const bool has_memory = std::filesystem::is_directory("/dev/shm") && ::access("/dev/shm", W_OK) == 0;
  const std::string in_memory = "/dev/shm/tessera-shard-" + std::to_string(::getpid());
  for (const std::string& file : {folder.file("a"), has_memory ? in_memory : folder.file("b")}) {
    for (const std::int64_t numel : {std::int64_t{0}, std::int64_t{1}, kMiB - 1, kMiB, 4 * kMiB - 1, 4 * kMiB,
                                     4 * kMiB + 1, 8 * kMiB, 8 * kMiB + 4096, 9 * kMiB + 7}) {
      ShardHeader header;
      if (numel > 0) header.pieces = {{"master", "w", "U8", 0, numel}};
      const std::vector<std::byte> bytes = numel > 0 ? made_up_bytes(header.pieces[0], 1) : std::vector<std::byte>();
      const std::filesystem::path path = file;
      auto writer = ShardWriter::create(path.parent_path().string(), path.filename().string(), header, "rank 0");
      ASSERT_TRUE(writer.ok()) << writer.status();
      for (std::span<const std::byte> left = bytes; !left.empty();) {
        const std::size_t most = std::uniform_int_distribution<int>(0, 1)(random) == 0 ? 5000 : 3000000;
        const std::size_t next = std::min(left.size(), std::uniform_int_distribution<std::size_t>(1, most)(random));
        ASSERT_TRUE((*writer)->append(left.first(next)).ok());
        left = left.subspan(next);
      }
      const auto saved = (*writer)->finish();
      ASSERT_TRUE(saved.ok()) << saved.status();
      const std::string content = content_of(file);
      EXPECT_EQ(saved->bytes, static_cast<std::int64_t>(content.size()));
      EXPECT_EQ(saved->header_bytes % 4096, 0);
      ASSERT_EQ(content.size(), static_cast<std::size_t>(saved->header_bytes) + bytes.size());
      EXPECT_TRUE(bytes.empty() || std::memcmp(content.data() + saved->header_bytes, bytes.data(), bytes.size()) == 0)
          << numel;
      std::size_t at = 0;
      for (const std::uint64_t hash : saved->chunk_hashes) {
        const std::size_t chunk = std::min(bytes.size() - at, static_cast<std::size_t>(kMiB));
        EXPECT_EQ(hash, checkpoint_hash(std::span(bytes).subspan(at, chunk))) << numel;
        at += chunk;
      }
      EXPECT_EQ(at, bytes.size());
      ::unlink(file.c_str());
    }
  }
}

TEST(SavedCheckpoint, ShortWritesAreContinuedAndWrongSizesRefused) {
  const ScratchFolder folder;
  const Piece piece{"master", "w", "F32", 0, 3000000};
  ShardHeader header{{piece}};
  const auto bytes = made_up_bytes(piece, 1);
  {
    ScopedFaults faults({{.site = FaultSite::kWrite, .every = 2, .action = FaultAction::kShort, .number = 99999}});
    auto writer = ShardWriter::create(folder.path(), "a", header, "rank 0");
    ASSERT_TRUE((*writer)->append(bytes).ok());
    ASSERT_TRUE((*writer)->finish().ok());
  }
  const std::string content = content_of(folder.file("a"));
  EXPECT_EQ(std::memcmp(content.data() + content.size() - bytes.size(), bytes.data(), bytes.size()), 0);
  auto writer = ShardWriter::create(folder.path(), "b", header, "rank 0");
  ASSERT_TRUE((*writer)->append(std::span(bytes).first(100)).ok());
  EXPECT_EQ(exit_code_of((*writer)->finish().status()), ExitCode::kInternal);
  EXPECT_EQ(exit_code_of(ShardWriter::create(folder.path(), "a", header, "rank 0").status()), ExitCode::kCannotCreate);
}

}  // namespace
}  // namespace tessera
