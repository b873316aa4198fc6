#include "sharding/gather/unit_keeper.h"

#include <exception>

#include "sharding/unit.h"

namespace tessera {

void UnitKeeper::use_or_poison(Unit& unit) noexcept {
  try {
    use(unit);
  } catch (const Error& error) {
    unit.poison(error.message());
    on_failure_(error);
  } catch (const std::exception& error) {
    unit.poison(error.what());
    on_failure_(Error(ExitCode::kInternal, error.what()));
  }
}

void UnitKeeper::unpin(Unit& unit) { unit.unpin(); }

}  // namespace tessera
