from stasis.daemon.main import main

main()
