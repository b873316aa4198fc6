#pragma once

namespace tessera {

/// The end of an error's text about a file whose content is wrong: a file of a checkpoint, or a file of tensors that
/// any program wrote.
inline constexpr char kDamagedCheckpointHint[] =
    ". [T0071] hint: load an earlier checkpoint, or another copy of this one (tessera checkpoint verify names all that "
    "is damaged)";
inline constexpr char kDamagedFileHint[] = ". [T0072] hint: fetch or write this file again";

}  // namespace tessera
