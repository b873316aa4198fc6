#pragma once

// See docs/glossary.md: slot.

#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "offload/files/aligned_memory.h"
#include "offload/files/scratch_room.h"
#include "offload/files/sector.h"
#include "offload/io/io_ring.h"
#include "offload/tier.h"

namespace tessera {

/// The options of a Spill.
struct SpillOptions {
  std::string who = {};  ///< text at the beginning of errors: "rank 0 activations"
  /// One directory or more, each on a separate disk. Pieces are written to the directories in turn.
  std::vector<std::string> directories = {};
  std::size_t piece_bytes = std::size_t{2} << 20;  ///< largest number of bytes in one transfer, 1 or more
  /// number of pieces that are read ahead, and of pieces that are written in the background: 1 to 32
  int queue_depth = 8;
  bool verify = false;  ///< whether a checksum of each piece is kept, and compared when the piece is read
  bool direct = true;   ///< BlockFileOptions::direct
  IoRingOptions io = {};
};

/// A store for values of any length. A value is put once, got any number of times, and dropped; usually the last value
/// is got first. Values are in scratch files, which are written in the background and read ahead. The number of values
/// need not be given in advance, unlike the number of records of a FileTier, and a value may be larger than the Spill's
/// memory. A Spill keeps activations that are offloaded to files.
///
/// **Memory.** A Spill allocates `2 x queue_depth + 1` slots of `piece_bytes` when it is made. `put` cuts a value into
/// pieces, copies each piece into a slot, and returns when the last piece has a slot. The caller may then free the
/// value. While all slots are being written, `put` waits for the disk.
///
/// **Order.** `get` copies pieces out when their reads have ended, and always reads ahead the next `queue_depth`
/// pieces. These are the rest of the value, then the values that were put before it, the latest first. A slot keeps its
/// piece until the slot is needed for another piece. The slot whose piece is last in this order is emptied first. So no
/// read is needed to get the value that was put last, if the slots have room for all its pieces.
///
/// **Space on the disk** grows with the values that are put (ScratchRoom), so a full disk is an error of `put`.
///
/// **Errors.** After the first error, every later `put` and `get` returns that error, so a value that was not written
/// is never returned. One thread at a time may use a Spill, and always the same thread unless `io.any_thread` is set.
class Spill {
 public:
  using Id = std::int64_t;

  /// Returns the number of bytes that `create` allocates. It is exact, but does not contain io_uring's rings and
  /// threads' stacks.
  static constexpr std::size_t memory_bytes(std::size_t piece_bytes, int queue_depth) {
    return slots_of(queue_depth) * whole_sectors(piece_bytes);
  }
  /// Checks the directories and allocates memory, but no space on the disk. Errors: those of look_at_scratch_directory;
  /// 71 if there is not enough memory; 70 if options are invalid.
  static absl::StatusOr<std::unique_ptr<Spill>> create(SpillOptions options);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  /// Stores a copy of `bytes`, which are not empty. Each value gets a larger id than the values before it. Errors:
  /// those of BlockFile and IoRing, also of earlier writes.
  absl::StatusOr<Id> put(std::span<const std::byte> bytes);
  /// Copies a value to `memory`, which has the size of the value. Errors: those of reads and of earlier writes; 65 if
  /// the bytes differ from those that were written.
  absl::Status get(Id id, std::span<std::byte> memory);
  /// Removes a value, without waiting. The value's space on the disk can be used again when the transfers of the value
  /// have ended.
  void drop(Id id);

  TierCounters counters() const;
  std::size_t memory_bytes() const { return memory_.bytes(); }
  /// `file_bytes` and `taken_bytes` return numbers of bytes on the disk: of all files, and of the values in the files.
  std::int64_t file_bytes() const;
  std::int64_t taken_bytes() const;
  std::string describe() const { return ring_->describe(); }

 private:
  static constexpr Id kNone = -1;
  enum class SlotState : std::uint8_t { kFree, kWriting, kReading, kFilled };
  /// Memory for one piece. Unless the state is kFree, the slot contains the bytes of a piece of the value `id`, or will
  /// contain them when the read has ended.
  struct Slot {
    SlotState state = SlotState::kFree;
    Id id = kNone;  ///< kNone if the value was dropped while a transfer was under way
    std::size_t piece = 0;
    bool was_got = false;
    bool unverified = false;  ///< whether the piece was read and its checksum was not compared yet
    std::uint64_t begun = 0;  ///< number of the slot's transfer, in the order in which transfers began
    Room room;                ///< space of the transfer on the disk. If the value was dropped, the space is freed when
                              ///< the transfer ends
  };
  struct Piece {
    Room room;
    std::size_t bytes = 0;  ///< number of the value's bytes in this piece
    int slot = -1;          ///< slot that has the piece; -1: no slot has it
    std::uint64_t checksum = 0;
  };

  static constexpr std::size_t slots_of(int queue_depth) { return 2 * static_cast<std::size_t>(queue_depth) + 1; }
  explicit Spill(SpillOptions options);

  std::span<std::byte> memory_of(int slot) const;
  absl::Status put_piece(Id id, std::size_t index, Piece& piece, std::span<const std::byte> bytes);
  absl::Status transfer(IoKind kind, int slot, const Piece& piece);
  absl::Status end_transfer(int slot);
  absl::Status end_what_has_ended();
  absl::StatusOr<int> empty_slot();
  int slot_to_empty(const Slot* needed) const;
  bool is_needed_later(const Slot& a, const Slot& b) const;
  void empty(int slot);
  absl::Status read(Id id, std::size_t index, int slot);
  absl::Status read_ahead(Id id, std::size_t index);
  absl::Status verify(int slot, const Piece& piece);
  absl::Status fail(const absl::Status& status);
  ScratchRoom& room_of(const Room& room);

  const SpillOptions options_;
  AlignedMemory memory_;
  std::vector<ScratchRoom> rooms_;  ///< one for each directory
  std::vector<Slot> slots_;
  std::map<Id, std::vector<Piece>> values_;
  Id next_ = 0;
  std::size_t turn_ = 0;     ///< index of the directory for the next piece
  std::uint64_t begun_ = 0;  ///< number of transfers that were begun
  TierCounters counters_;    ///< all counters except wait_seconds, which is added when they are read
  absl::Status failure_;
  std::unique_ptr<IoRing> ring_;  ///< declared after the memory and files that it uses, so that it is destroyed before
                                  ///< them
};

}  // namespace tessera
