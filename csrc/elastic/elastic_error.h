// The errors of an elastic job, which are public.
#pragma once

#include "torchft_ext/elastic_error.h"
