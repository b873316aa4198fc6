// Tests checkpoints that are divided into another number of files.

#include "checkpoint/reshard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>

#include "checkpoint/checkpoint_folder.h"
#include "offload/files/fault_plan.h"
#include "runtime/base/status.h"
#include "tests/checkpoint/made_up.h"
#include "tests/offload/scratch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr char kWho[] = "reshard";

std::unique_ptr<SavedCheckpoint> opened(const std::string& path) {
  auto checkpoint = SavedCheckpoint::open(path, kWho);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return checkpoint.ok() ? *std::move(checkpoint) : nullptr;
}

/// Returns all elements of a tensor, or nothing if the tensor does not exist.
std::vector<std::byte> all_of(SavedCheckpoint& checkpoint, const std::string& what, const std::string& name) {
  const auto places = checkpoint.pieces(what, name);
  if (places.empty()) return {};
  const Piece& last = places.back().piece;
  std::vector<std::byte> bytes(static_cast<std::size_t>((last.offset + last.numel) * element_bytes(last.dtype)));
  const absl::Status status = checkpoint.read(what, name, 0, bytes);
  EXPECT_TRUE(status.ok()) << status;
  return bytes;
}

/// Returns the first element and the bytes of each piece of a tensor. The pieces need not cover the tensor.
std::vector<std::pair<std::int64_t, std::vector<std::byte>>> parts_of(SavedCheckpoint& checkpoint,
                                                                      const std::string& what,
                                                                      const std::string& name) {
  std::vector<std::pair<std::int64_t, std::vector<std::byte>>> parts;
  for (const SavedCheckpoint::Place& place : checkpoint.pieces(what, name)) {
    std::vector<std::byte> bytes(static_cast<std::size_t>(place.piece.bytes()));
    EXPECT_TRUE(checkpoint.read(what, name, place.piece.offset, bytes).ok());
    parts.emplace_back(place.piece.offset, std::move(bytes));
  }
  return parts;
}

/// Compares all tensors that the manifest of `a` names. SavedCheckpoint::open has checked that `a` has no other
/// tensors.
void expect_same_tensors(SavedCheckpoint& a, SavedCheckpoint& b) {
  const Manifest& manifest = a.manifest();
  const auto same = [&](const std::string& what, const std::string& name) {
    EXPECT_EQ(all_of(a, what, name), all_of(b, what, name)) << what << " of " << name;
  };
  for (const SavedParameter& parameter : manifest.parameters) {
    for (const char* const what : {kMaster, kValue}) same(what, parameter.name);
    for (const SavedState& state : manifest.states) {
      same(state.name, parameter.name);
      same(state.name + kScales, parameter.name);
    }
  }
  for (const SavedTensor& buffer : manifest.buffers) {
    same(kBuffer, buffer.name);
    for (const std::int64_t rank : buffer.ranks) same(buffer_of_rank(rank), buffer.name);
  }
  for (const SavedTensor& item : manifest.items) same(kItem, item.name);
  for (std::int64_t rank = 0; rank < manifest.generators; ++rank) same(kGenerator, std::to_string(rank));
  for (const SavedParameter& parameter : manifest.parameters) {
    same(kFactors, parameter.name);
    for (std::int64_t rank = 0; rank < manifest.ranks; ++rank) {
      for (const char* const what : {kResidual, kReplicaResidual}) {
        EXPECT_EQ(parts_of(a, of_rank(what, rank), parameter.name), parts_of(b, of_rank(what, rank), parameter.name));
      }
    }
  }
}

Manifest without_files(Manifest manifest) {
  manifest.files.clear();
  return manifest;
}

TEST(Reshard, AnyNumberOfFilesHoldsTheSameTensors) {
  const ScratchFolder made, folder;
  write_made_up_checkpoint(made.path());
  const auto from = opened(made.path());
  for (const std::int64_t files : {1, 2, 3, 7, 50}) {
    const auto path = reshard_checkpoint(*from, folder.path(), files, kWho);
    ASSERT_TRUE(path.ok()) << path.status();
    EXPECT_EQ(*find_checkpoint(folder.path(), kWho), *path);
    const auto to = opened(*path);
    ASSERT_NE(to, nullptr);
    EXPECT_EQ(write_manifest(without_files(to->manifest())), write_manifest(without_files(from->manifest())));
    EXPECT_EQ(static_cast<std::int64_t>(to->manifest().files.size()), files);
    expect_same_tensors(*from, *to);
    for (std::int64_t chunk = 0; chunk < to->chunks(); ++chunk) EXPECT_TRUE(to->verify(chunk).ok());
    // Nearly all elements belong to one parameter, which takes 7.0 bytes per element in a checkpoint. The last file has
    // the rest.
    for (std::size_t file = 0; files < 10 && file + 1 < to->manifest().files.size(); ++file) {
      const double share = static_cast<double>(to->manifest().files[file].data_bytes()) * static_cast<double>(files);
      EXPECT_NEAR(share / (7.0 * 700 * 512), 1, 0.15) << file << " of " << files;
    }
  }
}

// The checkpoint has a matrix, in the second of many files, and an empty parameter whose states have elements.
TEST(Reshard, StatesOfOtherShapesStayWhole) {
  const ScratchFolder made;
  Manifest manifest;
  manifest.states = {{"m", "fp32"}, {"rows", "fp32"}};
  manifest.parameters = {{"first", {}, {700}, {}, "F32", true},
                         {"matrix", {}, {400, 3}, {}, "F32", true},
                         {"none", {}, {0, 5}, {}, "F32", true}};
  manifest.parameters[0].states = {"m"};
  for (SavedParameter& parameter : std::span(manifest.parameters).subspan(1)) parameter.states = {"m", "rows"};
  manifest.parameters[1].state_shapes = {{"rows", {400, 1}}};
  manifest.parameters[2].state_shapes = {{"rows", {5}}};
  manifest.files = {write_made_up(made.path(), "a",
                                  {{"master", "first", "F32", 0, 700},
                                   {"m", "first", "F32", 0, 700},
                                   {"master", "matrix", "F32", 0, 1200},
                                   {"m", "matrix", "F32", 0, 1200},
                                   {"rows", "matrix", "F32", 0, 256},
                                   {"rows", "matrix", "F32", 256, 144},
                                   {"rows", "none", "F32", 0, 5}},
                                  1)};
  write_content(made.file("manifest.json"), write_manifest(manifest));
  const auto from = opened(made.path());
  ASSERT_NE(from, nullptr);
  for (const std::int64_t files : {1, 3, 9}) {
    const ScratchFolder folder;
    const auto path = reshard_checkpoint(*from, folder.path(), files, kWho);
    ASSERT_TRUE(path.ok()) << path.status();
    const auto to = opened(*path);
    ASSERT_NE(to, nullptr);
    EXPECT_EQ(write_manifest(without_files(to->manifest())), write_manifest(without_files(from->manifest())));
    expect_same_tensors(*from, *to);
    EXPECT_EQ(to->pieces("rows", "matrix").size(), 1u);
  }
}

TEST(Reshard, ReshardingThereAndBackGivesTheSameFiles) {
  const ScratchFolder made, folder, there, back;
  write_made_up_checkpoint(made.path());
  const auto two = reshard_checkpoint(*opened(made.path()), folder.path(), 2, kWho);
  ASSERT_TRUE(two.ok()) << two.status();
  const auto five = reshard_checkpoint(*opened(*two), there.path(), 5, kWho);
  ASSERT_TRUE(five.ok()) << five.status();
  const auto again = reshard_checkpoint(*opened(*five), back.path(), 2, kWho);
  ASSERT_TRUE(again.ok()) << again.status();
  for (const char* const file : {"/manifest.json", "/rank-00000.safetensors", "/rank-00001.safetensors"})
    EXPECT_EQ(content_of(*two + file), content_of(*again + file)) << file;
}

TEST(Reshard, FailedReshardingLeavesNothing) {
  const ScratchFolder made;
  write_made_up_checkpoint(made.path());
  for (const FaultSite site : {FaultSite::kOpen, FaultSite::kWrite, FaultSite::kFsync, FaultSite::kRename}) {
    for (std::int64_t n = 1;; n += 3) {
      const ScratchFolder folder;
      absl::Status status;
      std::int64_t hits = 0;
      {
        const auto from = opened(made.path());
        ScopedFaults faults(
            {{.site = site, .path = folder.path(), .nth = n, .action = FaultAction::kErrno, .number = ENOSPC}});
        status = reshard_checkpoint(*from, folder.path(), 3, kWho).status();
        hits = faults.plan().faults();
      }
      if (hits == 0) break;
      EXPECT_FALSE(status.ok()) << n;
      const auto there = list_checkpoints(folder.path(), kWho);
      if (!there->empty()) opened(folder.path() + "/" + (*there)[0].name);  // the copy was committed before the error
    }
  }
}

TEST(Reshard, DamagedCheckpointIsNotCopied) {
  const ScratchFolder made, folder;
  write_made_up_checkpoint(made.path());
  const std::string name = opened(made.path())->manifest().files[0].name, file = made.file(name);
  std::string bytes = content_of(file);
  bytes[bytes.size() - 5] ^= 1;
  write_content(file, bytes);
  const auto from = opened(made.path());
  const absl::Status status = reshard_checkpoint(*from, folder.path(), 2, kWho).status();
  EXPECT_EQ(exit_code_of(status), ExitCode::kCorruptData);
  EXPECT_THAT(message_of(status), AllOf(HasSubstr(name), HasSubstr("damaged")));
  EXPECT_THAT(*list_checkpoints(folder.path(), kWho), IsEmpty());
  EXPECT_EQ(exit_code_of(reshard_checkpoint(*from, folder.path(), 0, kWho).status()), ExitCode::kUsage);
}

}  // namespace
}  // namespace tessera
