// Ends what isa_begin.h began.
#if APEX_VECTOR_BYTES > 16 && defined(__clang__)
#pragma clang attribute pop
#elif APEX_VECTOR_BYTES > 16
#pragma GCC pop_options
#endif
