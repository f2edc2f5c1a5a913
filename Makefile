# make                 build/mcp, the libraries, the examples
# make demo            the whole journey, with the demo server; installs what
#                      is missing
# make test            all tests; installs what is missing
# make check           style rules and symbols
# make sanitize        the tests with ASan and UBSan
# make switches        every MCP_NO_ switch alone, and all of them
# make fuzz            every parser for some seconds (clang; SECONDS=5)
# make interop         real servers from npm
# make conformance     the official conformance suite, both versions
# make oauth           sign-in, from the first login to the logout
# make rank SETS=dir   search quality on the sets of that directory
# make install PREFIX=/usr/local      make clean
#
# JSMN=dir holds another jsmn.h; BEARSSL=dir another BearSSL: its sources built
# in place (inc/, build/) or an installation (include/, lib/).
CC = cc
AR = ar
CFLAGS = -O2 -g
LDFLAGS =
PREFIX = /usr/local
DESTDIR =
JSMN =
BEARSSL =
SECONDS = 5
SETS =
WERROR =

WARN = -std=c99 -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wundef \
       -Wstrict-prototypes -Wmissing-prototypes -Wwrite-strings -Wcast-qual \
       $(WERROR)
# Programs that include mcp.c for its private parts do not use all of them.
PART = -Wno-unused-function
POSIX = -D_DEFAULT_SOURCE -D_POSIX_C_SOURCE=200809L
VARS = J='$(JSMN)'; B='$(BEARSSL)'; set -e
INC = -I. $${J:+-isystem "$$J"} $${B:+-isystem "$$B/inc" -isystem "$$B/include"}
LIB = $${B:+-L"$$B/build" -L"$$B/lib"} -lbearssl

EXAMPLES = build/hello build/call build/events build/custom_io

all: build/mcp build/libmcp.a build/libmcp.so $(EXAMPLES) build/demo_server \
     build/rank build/conformance

build/mcp.o: mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(INC) -c -o $@ mcp.c
build/libmcp.a: build/mcp.o
	rm -f $@; $(AR) rcs $@ build/mcp.o
build/libmcp.so: mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(INC) -fPIC -shared $(LDFLAGS) -o $@ \
	    mcp.c $(LIB)
build/mcp: examples/cli.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/cli.c build/libmcp.a $(LIB)
build/hello: examples/hello.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/hello.c build/libmcp.a $(LIB)
build/call: examples/call.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/call.c build/libmcp.a $(LIB)
build/events: examples/events.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/events.c build/libmcp.a $(LIB)
build/custom_io: examples/custom_io.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/custom_io.c build/libmcp.a $(LIB)
build/demo_server: examples/demo_server.c mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(PART) $(INC) $(LDFLAGS) -o $@ \
	    examples/demo_server.c $(LIB)
build/rank: examples/rank.c mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(PART) $(INC) $(LDFLAGS) -o $@ \
	    examples/rank.c $(LIB)
build/conformance: examples/conformance.c build/libmcp.a
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(POSIX) $(INC) $(LDFLAGS) -o $@ \
	    examples/conformance.c build/libmcp.a $(LIB)
build/mcp_test: mcp_test.c mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) $(CFLAGS) $(WARN) $(PART) $(INC) $(LDFLAGS) -o $@ \
	    mcp_test.c $(LIB) -lpthread
build/mcp_test_san: mcp_test.c mcp.c mcp.h
	@mkdir -p build
	$(VARS); $(CC) -g -O1 $(WARN) $(PART) $(INC) \
	    -fsanitize=address,undefined -fno-sanitize-recover=all $(LDFLAGS) \
	    -o $@ mcp_test.c $(LIB) -lpthread

setup:
	@CC='$(CC)' JSMN='$(JSMN)' BEARSSL='$(BEARSSL)' sh .ci/setup
demo: setup
	@$(MAKE) all
	@sh .ci/demo
test: setup
	@sh .ci/setup openssl
	@$(MAKE) all build/mcp_test
	build/mcp_test
sanitize: setup build/mcp_test_san
	build/mcp_test_san
check:
	@CC="$(CC)" bash .ci/check
switches:
	@CC='$(CC)' bash .ci/switches
fuzz: setup
	@bash .ci/fuzz $(SECONDS)
interop: setup
	@$(MAKE) all
	@bash .ci/interop
conformance: setup
	@$(MAKE) all
	@bash .ci/conformance
oauth: setup
	@$(MAKE) all
	@bash .ci/oauth
rank: build/rank
	@bash .ci/rank '$(SETS)'

install: all
	mkdir -p $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/include \
	    $(DESTDIR)$(PREFIX)/lib/pkgconfig
	cp build/mcp $(DESTDIR)$(PREFIX)/bin/
	cp mcp.h $(DESTDIR)$(PREFIX)/include/
	cp build/libmcp.a build/libmcp.so $(DESTDIR)$(PREFIX)/lib/
	printf '%s\n' 'prefix=$(PREFIX)' 'Name: mcp' \
	    'Description: Model Context Protocol client' \
	    "Version: $$(sed -n 's/^#define MCP_VERSION "\(.*\)"/\1/p' mcp.h)" \
	    'Cflags: -I$${prefix}/include' \
	    'Libs: -L$${prefix}/lib -lmcp' 'Libs.private: -lbearssl' \
	    >$(DESTDIR)$(PREFIX)/lib/pkgconfig/mcp.pc
clean:
	rm -rf build

.PHONY: all setup demo test sanitize check switches fuzz interop conformance \
        oauth rank install clean
