/* TARGET(features) makes what follows in the file for a processor with these; both compilers know it, by other names. */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define TARGET(features) PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define END_TARGET _Pragma("clang attribute pop")
#else
#define TARGET(features) PRAGMA(GCC target(features))
#define END_TARGET
#endif
