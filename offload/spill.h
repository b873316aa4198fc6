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
  std::string who = {};  ///< text in front of errors: "rank 0 activations"
  /// One directory or more, each on a disk of its own: pieces are written to them in turn.
  std::vector<std::string> directories = {};
  std::size_t piece_bytes = std::size_t{2} << 20;  ///< 1 or more: the most that one transfer moves
  /// number of pieces read ahead, and of pieces written behind: 1 to 32
  int queue_depth = 8;
  bool verify = false;  ///< whether it keeps a checksum of each piece and compares it when the piece is read
  bool direct = true;   ///< BlockFileOptions::direct
  IoRingOptions io = {};
};

/// Values of any length that are put once, got any number of times (usually the last one first), and dropped. They lie
/// in scratch files, written behind and read ahead asynchronously. Unlike a FileTier, it need not know beforehand how
/// many values there are, and a value may be larger than the Spill's memory. Activations that are offloaded to files
/// are kept in a Spill.
///
/// **Memory.** It takes `2 x queue_depth + 1` slots of `piece_bytes` when it is made. A value is cut into pieces, and
/// `put` copies each into a slot. It returns when the last piece has a slot; the caller may then free its bytes. While
/// all slots are being written, `put` waits for the disk.
///
/// **Order.** `get` copies pieces out as their reads end, and always reads ahead the `queue_depth` pieces that come
/// next: the rest of the value, then the values put before it, the last one first. A slot keeps its piece until the
/// slot is needed for another one. The piece that comes last in that order loses its slot first. So the value that was
/// put last is got without a read.
///
/// **Room on the disk** grows with what is put (ScratchRoom), so a full disk is an error of `put`.
///
/// **Errors.** The first one stays: every later `put` and `get` returns it, so no value comes back that a failed write
/// has not kept. One thread at a time may use it, always the same one unless `io.any_thread` is set.
class Spill {
 public:
  using Id = std::int64_t;

  /// Returns the bytes of memory that `create` takes: exact, except for io_uring's rings or the threads' stacks.
  static constexpr std::size_t memory_bytes(std::size_t piece_bytes, int queue_depth) {
    return slots_of(queue_depth) * whole_sectors(piece_bytes);
  }
  /// Looks at the directories; takes memory, and nothing on the disk. Errors: those of look_at_scratch_directory; 71 no
  /// memory; 70 options that make no sense.
  static absl::StatusOr<std::unique_ptr<Spill>> create(SpillOptions options);
  ~Spill();
  Spill(const Spill&) = delete;
  Spill& operator=(const Spill&) = delete;

  /// Takes a copy of `bytes`, at least one. Ids grow. Errors: those of BlockFile and IoRing, of earlier writes too.
  absl::StatusOr<Id> put(std::span<const std::byte> bytes);
  /// Copies a value to `memory`, which has its size. Errors: those of reads, and of earlier writes; 65 the bytes are
  /// not those that were written.
  absl::Status get(Id id, std::span<std::byte> memory);
  /// Forgets a value. It does not wait. The room is used again when transfers of the value have ended.
  void drop(Id id);

  TierCounters counters() const;
  std::size_t memory_bytes() const { return memory_.bytes(); }
  /// Returns the bytes on the disk: those of all files, and those of the values in them.
  std::int64_t file_bytes() const;
  std::int64_t taken_bytes() const;
  std::string describe() const { return ring_->describe(); }

 private:
  static constexpr Id kNone = -1;
  enum class SlotState : std::uint8_t { kFree, kWriting, kReading, kFilled };
  /// Memory for one piece. It holds the bytes of `id`'s piece in every state but kFree, or will hold them when its read
  /// has ended.
  struct Slot {
    SlotState state = SlotState::kFree;
    Id id = kNone;  ///< kNone where the value was dropped while a transfer was under way
    std::size_t piece = 0;
    bool was_got = false;
    bool unverified = false;  ///< whether its piece was read and the checksum was not compared yet
    std::uint64_t begun = 0;  ///< number of its transfer, in the order in which transfers begin
    Room room;                ///< room of the transfer; given back when the transfer ends, if the value was dropped
  };
  struct Piece {
    Room room;
    std::size_t bytes = 0;  ///< bytes of the value
    int slot = -1;          ///< slot that holds it; -1: none does
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
  std::size_t turn_ = 0;     ///< directory of the next piece
  std::uint64_t begun_ = 0;  ///< number of transfers begun
  TierCounters counters_;    ///< all counters except wait_seconds, which is added when they are read
  absl::Status failure_;
  std::unique_ptr<IoRing> ring_;  ///< declared behind the memory and files that it uses, so that it is destroyed first
};

}  // namespace tessera
