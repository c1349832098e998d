#include "torchft_ext/error.h"

namespace torchft_ext {

CommError::~CommError() = default;

}  // namespace torchft_ext
